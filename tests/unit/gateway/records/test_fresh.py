"""What is known for a while."""

from __future__ import annotations

from services.gateway.records.fresh import Fresh


class Clock:
    now = 10.0

    def __call__(self) -> float:
        return self.now


def test_what_is_put_is_known_for_a_while() -> None:
    clock = Clock()
    fresh: Fresh[int] = Fresh(10, 5.0, clock)
    assert fresh.get("a") is None
    fresh.put("a", 1)
    clock.now += 4.9
    assert fresh.get("a") == 1
    clock.now += 0.1
    assert fresh.get("a") is None


def test_what_is_put_again_is_known_from_then_on() -> None:
    clock = Clock()
    fresh: Fresh[int] = Fresh(10, 5.0, clock)
    fresh.put("a", 1)
    clock.now += 4.0
    fresh.put("a", 2)
    clock.now += 4.0
    assert fresh.get("a") == 2


def test_of_too_many_the_oldest_go_and_so_does_what_is_not_known_any_more() -> None:
    clock = Clock()
    fresh: Fresh[int] = Fresh(2, 5.0, clock)
    for name in "abc":
        fresh.put(name, 0)
    assert [fresh.get(name) for name in "abc"] == [None, 0, 0]
    clock.now += 5.0
    fresh.put("d", 0)
    assert list(fresh._kept) == ["d"]


def test_what_was_dropped_is_not_known() -> None:
    fresh: Fresh[int] = Fresh(2, 5.0)
    fresh.put("a", 1)
    fresh.drop("a")
    fresh.drop("a")
    assert fresh.get("a") is None
