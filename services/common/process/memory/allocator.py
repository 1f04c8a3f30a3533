"""What the C allocator does with memory that was given back.

On a CPU tensors are the C allocator's. glibc gives large ones back to the kernel as soon as nobody has them,
and the next ones are cleared page after page when they are written: a sixth of the time of a training pass of
a thousand tokens. So what computes there has it keep some.

Invariant: only the allocator of this process is told, and one that cannot be told stays as it is.
"""

from __future__ import annotations

import ctypes

KEPT_BYTES = 1 << 30
"""At the end of the heap, for what comes next."""

_LARGE_BYTES = 256 << 20
"""What is larger goes back all the same."""
_MORE_BYTES = 64 << 20
"""That the heap grows by."""
# Of mallopt(3).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3


def keep_freed_memory() -> bool:
    """From now on what is freed is kept for what comes next; whether the allocator can be told."""
    tell = getattr(ctypes.CDLL(None), "mallopt", None)
    options = ((_TRIM_THRESHOLD, KEPT_BYTES), (_TOP_PAD, _MORE_BYTES), (_MMAP_THRESHOLD, _LARGE_BYTES))
    return tell is not None and all(tell(option, value) for option, value in options)


def give_back() -> None:
    """Gives the kernel what nobody has."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
