"""What an exception of the engine means: for the operations that it came up in, and for the process.

Invariant: whether it was memory, the device or anything else is decided here alone. What is of the device
ends the process: nothing that is computed on it afterwards can be relied on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from services.common.contract.errors import Internal, TinsmithError
from services.common.process import failpoints
from services.common.process.memory import allocator
from services.trainer.compute.data import Failure, Row

OUT_OF_MEMORY = "out_of_memory"
"""Code of the failure of an operation with a sequence that does not fit."""

_NO_MEMORY = 2
"""CUDA's own number for it: what torch does not allocate, such as a kernel's stack, is refused like this."""
_NO_MEMORY_WORDS = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
"""Of a CPU, whose error has no type of its own, and of libraries that allocate by themselves."""
_OF_THE_CALL = frozenset((1, 9, 98, 209, 701, 801))
"""CUDA's errors of what was asked of it (invalid value, invalid configuration, no such function, no code for
this device, too many resources, not supported), which is not done. The device goes on."""

failpoints.name_error("oom", torch.OutOfMemoryError)
failpoints.name_error("device", torch.AcceleratorError)


class LacksMemory(Exception):
    """A rank has no memory for its part of what all of them compute at once, and so the world ends.

    Attributes:
        tokens: with which micro-batches of several sequences may fit; 0: no fewer than now.
        operation: model and seq_id of a sequence that does not fit by itself; None: there were several.
        why: what its client is told.
    """

    def __init__(self, tokens: int, operation: tuple[str, int] | None, why: str) -> None:
        super().__init__(why)
        self.tokens, self.operation, self.why = tokens, operation, why


class NoMemory(Internal):
    """A rank found no memory for what a command needs, before anything was changed, and all ranks know that:
    the command fails alone, and the same may succeed when others have left the device."""

    default_code = OUT_OF_MEMORY


def free_cache() -> None:
    """Gives back what the allocator keeps for later, of the device that this process computes on."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    else:
        allocator.give_back()


def failure(error: TinsmithError) -> Failure:
    """The error as ranks tell it each other."""
    return Failure(error.category, error.code, error.message)


def is_out_of_memory(error: Exception) -> bool:
    """Whether it failed for want of memory, of the device or the host. The same may succeed with more."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or _number(error) == _NO_MEMORY:
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY_WORDS)


def is_of_device(error: Exception) -> bool:
    """Whether the device is in doubt, so that the process must end.

    A kernel that breaks off is told of by whatever is called next, in the words of that. So after an
    exception that does not say what it is of, this waits for the device, whose failure stays with it.
    """
    if isinstance(error, TinsmithError) or is_out_of_memory(error):
        return False
    if isinstance(error, torch.AcceleratorError) and _number(error) not in _OF_THE_CALL:
        return True
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def explained(error: Exception, rows: Sequence[Row]) -> TinsmithError:
    """What a client is told of a micro-batch that failed; one that did not fit into memory has one row."""
    if is_out_of_memory(error):
        free_cache()
        (row,) = rows
        return Internal(
            f"out of device memory on one sequence of {row.length} tokens; send shorter data, or start the "
            "trainer with --activation-checkpointing on; a smaller --micro-batch-tokens leaves more room for "
            "what else is on the device",
            OUT_OF_MEMORY,
        )
    return Internal(f"{type(error).__name__}: {error}")


def _number(error: Exception) -> int | None:
    """CUDA's, of an error that torch has from it."""
    return getattr(error, "error_code", None) if isinstance(error, torch.AcceleratorError) else None
