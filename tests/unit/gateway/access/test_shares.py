"""How much of a shared room one API key may hold."""

from services.gateway.access.shares import Shares


def fill(room: Shares, owner: str, amount: int = 1) -> int:
    """How often a key can take so much."""
    return next(count for count in range(1000) if not room.take(owner, amount))


def test_one_key_gets_half_and_every_further_one_half_of_the_rest() -> None:
    room = Shares(128)
    assert [fill(room, owner) for owner in ("ann", "bob", "eve", "joe")] == [64, 32, 16, 8]
    assert room.free == 8


def test_what_is_given_back_is_for_everybody() -> None:
    room = Shares(100)
    assert fill(room, "ann") == 50
    room.add("ann", -50)
    assert room.held_by("ann") == 0
    assert fill(room, "bob") == 50


def test_more_than_half_never_fits() -> None:
    room = Shares(100)
    assert room.ever_fits(50) and room.fits("ann", 50)
    assert not room.ever_fits(51) and not room.fits("ann", 51)


def test_what_is_added_in_any_case_counts() -> None:
    room = Shares(10)
    room.add("ann", 25)
    assert room.free == -15
    assert not room.take("bob", 1)


def test_of_a_key_that_holds_nothing_nothing_is_kept() -> None:
    room = Shares(100)
    for number in range(10):
        assert room.take(f"key {number}", 5)
        room.add(f"key {number}", -5)
    assert not room._used_by
