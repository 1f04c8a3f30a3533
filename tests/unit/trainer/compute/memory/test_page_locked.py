"""When page-locked memory that nobody uses goes back."""

from __future__ import annotations

import pytest
import torch

from services.trainer.compute.memory import page_locked
from services.trainer.compute.memory.page_locked import UNUSED_S, PageLocked, Use, goes_back

GIB = 2**30
MOST = 8 * GIB


def test_what_is_needed_now_and_then_is_kept() -> None:
    assert not goes_back(Use(used=0, kept=6 * GIB, peak=6 * GIB), MOST, UNUSED_S)
    assert not goes_back(Use(used=2 * GIB, kept=4 * GIB, peak=6 * GIB), MOST, UNUSED_S)


def test_what_lay_unused_for_a_while_goes_back_and_not_before() -> None:
    unused = Use(used=0, kept=6 * GIB, peak=GIB)
    assert not goes_back(unused, MOST, UNUSED_S - 1)
    assert goes_back(unused, MOST, UNUSED_S)


def test_more_than_may_be_kept_goes_back_at_once() -> None:
    assert goes_back(Use(used=0, kept=MOST + 1, peak=MOST + 1), MOST, 0.0)
    assert not goes_back(Use(used=0, kept=MOST, peak=MOST), MOST, 0.0)
    # What is used is not kept.
    assert not goes_back(Use(used=10 * MOST, kept=0, peak=10 * MOST), MOST, UNUSED_S)


def test_a_little_is_kept_for_ever() -> None:
    assert not goes_back(Use(used=0, kept=2**20, peak=0), MOST, UNUSED_S)


class Cuda:
    """The host's allocator of torch, as it was after a large publish."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.active, self.peak, self.held, self.freed = 0.0, 0, 0, 0, 0
        self.asked = 0
        monkeypatch.setattr(page_locked.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(torch.cuda, "host_memory_stats", self.stats)
        monkeypatch.setattr(torch.cuda, "reset_peak_host_memory_stats", self.reset)
        monkeypatch.setattr(torch.accelerator, "empty_host_cache", self.empty)
        monkeypatch.setattr(torch, "empty", self.allocate)

    def publish(self, size: int) -> None:
        """A copy that is done and gone: it is active until more memory is asked for."""
        self.active, self.peak, self.held = size, max(self.peak, size), max(self.held, size)

    def allocate(self, shape: list[int], *, dtype: torch.dtype, pin_memory: bool) -> None:
        assert shape == [1] and pin_memory
        self.active = 0

    def stats(self) -> dict[str, int]:
        self.asked += 1
        return {
            "active_bytes.current": self.active,
            "active_bytes.peak": self.peak,
            "allocated_bytes.current": self.held,
        }

    def reset(self) -> None:
        self.peak = self.active

    def empty(self) -> None:
        self.held = self.active
        self.freed += 1


def test_after_publishes_have_ended_their_memory_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)
    locked = PageLocked("cuda:0", MOST)
    while cuda.now < 5 * UNUSED_S:
        cuda.now += 30
        cuda.publish(6 * GIB)
        locked.tidy()
    assert cuda.freed == 0 and locked.use().kept == 6 * GIB
    ended = cuda.now
    while locked.use().kept:
        cuda.now += 30
        locked.tidy()
        assert cuda.now - ended <= 2 * UNUSED_S
    assert cuda.freed == 1 and cuda.now - ended >= UNUSED_S
    cuda.publish(MOST + GIB)
    cuda.now += 2
    locked.tidy()
    assert locked.use().kept == 0


def test_a_cpu_has_none_and_asks_no_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)
    locked = PageLocked("cpu", MOST)
    cuda.publish(20 * MOST)
    cuda.now += 10 * UNUSED_S
    locked.tidy()
    assert cuda.freed == 0 and locked.use() == Use(0, 0, 0)


def test_who_asks_what_is_used_does_not_wait_for_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)
    locked = PageLocked("cuda:0", MOST)
    cuda.publish(6 * GIB)
    assert locked.use() == Use(0, 0, 0) and cuda.asked == 0
    cuda.now += 2
    locked.tidy()
    asked = cuda.asked
    assert locked.use() == Use(0, 6 * GIB, 6 * GIB) and cuda.asked == asked
