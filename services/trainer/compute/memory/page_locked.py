"""Page-locked memory of the host: what copies from and to a device use of it, and what torch keeps for the
next ones, since the system takes long to give it.

Invariant: what is kept is bounded, but for the time until the next pass; and what no copy needed for a
while goes back. It does before a pass, or when nothing is computed: it waits for what the device has to do.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from services.trainer.compute.memory import staging
from services.trainer.compute.memory.machine import of_machine, ranks_here

OF_THE_MACHINE = 1 / 8
"""Of its memory the ranks on it keep so much at most."""

UNUSED_S = 120.0
"""What lay unused for so long goes back."""

_FEW = 64 * 2**20
"""Bytes that may lie unused for ever."""

_LOOK_S = 1.0


class Use(NamedTuple):
    """Bytes of this process.

    Attributes:
        used: by copies under way, and by what they are of.
        kept: beside them.
        peak: most that were used at once of late.
    """

    used: int
    kept: int
    peak: int


def goes_back(use: Use, most: int, seconds: float) -> bool:
    """Whether what is kept goes back. Pure.

    Args:
        most: bytes that may be kept.
        seconds: that `use.peak` is of.
    """
    unused = use.used + use.kept - max(use.peak, use.used)
    return use.kept > most or (seconds >= UNUSED_S and unused > _FEW)


def share() -> int:
    """Bytes that this rank may keep."""
    return of_machine(OF_THE_MACHINE) // ranks_here()


class PageLocked:
    """That of this rank. On a CPU there is none.

    Args:
        most: bytes that may be kept.
    """

    def __init__(self, device: str, most: int) -> None:
        self._on_cuda = device != "cpu"
        self._most = most
        self._since = self._looked = time.monotonic()
        self._found = Use(0, 0, 0)

    def use(self) -> Use:
        """What it was when `tidy` last looked. Anybody may ask, at any time: the allocator itself lets nobody
        in while it gives memory back."""
        return self._found

    def tidy(self) -> None:
        """Gives back what is kept in vain; before a pass, or when nothing is computed."""
        now = time.monotonic()
        if not self._on_cuda or now - self._looked < _LOOK_S:
            return
        self._looked = now
        # What copies used that are done counts as used until the allocator is asked for more.
        staging.room([1], torch.uint8)
        self._found = _look()
        if goes_back(self._found, self._most, now - self._since):
            torch.accelerator.empty_host_cache()
            self._found = _look()
        if now - self._since >= UNUSED_S:
            self._since = now
            torch.cuda.reset_peak_host_memory_stats()


def _look() -> Use:
    found = torch.cuda.host_memory_stats()
    if not found:
        return Use(0, 0, 0)
    used, peak = found["active_bytes.current"], found["active_bytes.peak"]
    return Use(used, found["allocated_bytes.current"] - used, peak)
