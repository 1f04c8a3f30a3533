"""Results that a process keeps for a moment."""

from __future__ import annotations

from services.gateway.results.recent import KEPT_BYTES, KEPT_S, LARGEST_BYTES, RecentResults


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_result_is_handed_out_once() -> None:
    recent = RecentResults()
    recent.keep("s:1", b"one")
    recent.keep("s:2", b"two")
    assert recent.take("s:1") == b"one"
    assert recent.take("s:1") is None
    assert recent.take("s:2") == b"two"


def test_a_result_is_kept_for_a_moment_only() -> None:
    clock = Clock()
    recent = RecentResults(clock)
    recent.keep("s:1", b"one")
    recent.keep("s:2", b"two")
    clock.now += KEPT_S / 2
    assert recent.take("s:1") == b"one"
    clock.now += KEPT_S / 2
    assert recent.take("s:2") is None


def test_what_nobody_asks_for_goes_when_more_comes() -> None:
    clock = Clock()
    recent = RecentResults(clock)
    recent.keep("s:1", b"one")
    clock.now += KEPT_S
    recent.keep("s:2", b"two")
    assert list(recent._kept) == ["s:2"]


def test_what_is_kept_is_bounded_and_the_oldest_go_first() -> None:
    recent = RecentResults()
    many = 2 * KEPT_BYTES // LARGEST_BYTES
    for number in range(many):
        recent.keep(f"s:{number}", bytes(LARGEST_BYTES))
        assert recent._bytes <= KEPT_BYTES
    assert recent.take("s:0") is None
    assert recent.take(f"s:{many - 1}") is not None


def test_a_large_result_is_not_kept() -> None:
    recent = RecentResults()
    recent.keep("s:1", bytes(LARGEST_BYTES + 1))
    assert recent.take("s:1") is None


def test_nothing_is_counted_of_what_was_taken_or_kept_twice() -> None:
    recent = RecentResults()
    recent.keep("s:1", b"one")
    recent.keep("s:1", b"one")
    assert recent.take("s:1") == b"one"
    assert recent._bytes == 0
