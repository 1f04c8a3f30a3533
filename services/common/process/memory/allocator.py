"""What the C allocator does with memory that was given back.

On a CPU tensors are the C allocator's. glibc gives those of some megabytes back to the kernel over and over,
and the next ones are cleared page after page when they are written: a sixth of the time of a training pass of
a thousand tokens. So what computes there has it keep them.

What is larger goes back as soon as nobody has it. What is smaller, glibc keeps between blocks that are in use
in any case; beside that, up to `_KEPT_BYTES` at the end of the heap stay, and in a thread that is not the
first one the heaps that it has once had, of 64 MiB each. `give_back` gives the kernel all of it.

Invariant: only the allocator of this process is told, and one that cannot be told stays as it is.
"""

from __future__ import annotations

import ctypes
import logging

log = logging.getLogger(__name__)

_KEPT_BYTES = 1 << 30
"""At the end of the heap, for what comes next."""

_LARGE_BYTES = 32 << 20
"""What is larger goes back. It is the most that every glibc can be told."""
_MORE_BYTES = 64 << 20
"""That the heap grows by."""
# Of mallopt(3). The first to be told is the only one that is ever refused: with the others alone the
# allocator would give back even more than it does untold.
_MMAP_THRESHOLD, _TRIM_THRESHOLD, _TOP_PAD = -3, -1, -2
_OPTIONS = ((_MMAP_THRESHOLD, _LARGE_BYTES), (_TRIM_THRESHOLD, _KEPT_BYTES), (_TOP_PAD, _MORE_BYTES))


def keep_freed_memory() -> bool:
    """From now on what is freed is kept for what comes next; whether the allocator can be told."""
    tell = getattr(ctypes.CDLL(None), "mallopt", None)
    told = tell is not None and all(tell(option, value) for option, value in _OPTIONS)
    if not told:
        log.warning("the C allocator cannot be told to keep freed memory: passes take longer than with glibc")
    return told


def give_back() -> None:
    """Gives the kernel what nobody has."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
