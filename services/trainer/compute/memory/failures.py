"""What an exception inside a micro-batch means for the operations in it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from services.common.contract.errors import Internal, TinsmithError
from services.common.process.memory import allocator
from services.trainer.compute.data import Failure, Row

OUT_OF_MEMORY = "out_of_memory"
"""Code of the failure of an operation with a sequence that does not fit."""


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
    """On a CPU the error has no type of its own."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


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
