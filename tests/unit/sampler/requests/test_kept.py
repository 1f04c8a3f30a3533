"""What is kept of finished samples."""

from __future__ import annotations

from services.sampler.requests.kept import Kept


def test_what_is_kept_first_goes_first_when_there_is_no_room_or_its_time_is_over() -> None:
    now = 0.0
    kept: Kept[str] = Kept(60, 25, lambda: now)
    for number in range(3):
        kept.keep(f"request {number}", b"d", f"answer {number}", 10)
        now += 10
    assert [f"request {number}" in kept for number in range(3)] == [False, True, True]
    now = 70.0
    assert kept.find("request 1", b"d") is None
    assert kept.find("request 2", b"d") == "answer 2"
    assert kept.find("request 2", b"another content") is None


def test_an_answer_in_the_place_of_another_takes_its_room_and_one_that_never_fits_takes_none() -> None:
    kept: Kept[str] = Kept(60, 25, lambda: 0.0)
    kept.keep("other", b"d", "stays", 5)
    for number in range(4):
        kept.keep("request", b"d", f"answer {number}", 20)
    kept.keep("large", b"d", "too large", 26)
    assert (kept.find("other", b"d"), kept.find("request", b"d")) == ("stays", "answer 3")
    assert "large" not in kept
