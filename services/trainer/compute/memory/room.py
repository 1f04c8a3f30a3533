"""Whether all ranks have the memory for what they do together, found out before they begin.

Once they have begun, a rank that runs out of memory leaves the others in a collective, or weights half
changed, and the whole world has to start again, with everybody's models.

Invariant: the ranks decide from the same numbers, and so alike.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from services.common.contract.errors import Internal
from services.common.process.process import free_machine_memory
from services.common.telemetry.repeats import Repeats
from services.trainer.compute.data import Failure, Pass
from services.trainer.compute.exchange import any_rank, least, meet
from services.trainer.compute.memory.capacity import GIB, Footprint, needed
from services.trainer.compute.memory.failures import (
    OUT_OF_MEMORY,
    failure,
    free_cache,
    is_of_device,
    is_out_of_memory,
)
from services.trainer.compute.memory.machine import gpu_memory, ranks_here

log = logging.getLogger(__name__)

_NONE = Repeats(log, "this rank found no memory")


def free_memory(device: str) -> int:
    """Bytes that this rank could have now, if it keeps nothing for later (`free_cache`): of its GPU, or its
    share of what is free of the machine."""
    if device == "cpu":
        return free_machine_memory() // ranks_here()
    return gpu_memory() - torch.cuda.memory_allocated()


def room_within(memory: int, device: str) -> int:
    """Bytes that this rank may yet take now, of `memory` in all; 0 = of all that it could have."""
    free = free_memory(device)
    if not memory:
        return free
    return min(free, memory - (0 if device == "cpu" else torch.cuda.memory_allocated()))


def has_room(copy: int, beside: int, device: str) -> bool:
    """Whether a copy of so many bytes fits beside what this rank may yet take of its device. It keeps the
    memory that the allocator has, so nothing waits. On a CPU there is no other place for it.

    Args:
        beside: bytes that are not taken yet.
    """
    return device == "cpu" or free_memory(device) >= copy + beside


def longest_split(work: Pass, refused: Mapping[int, Failure]) -> dict[int, int]:
    """Tokens of the longest sequence of each operation that all ranks compute together."""
    longest: dict[int, int] = {}
    for row in (row for batch in work.micro_batches if batch.split for row in batch.rows):
        if row.op not in refused:
            longest[row.op] = max(longest.get(row.op, 0), row.length)
    return longest


def without_room(
    work: Pass, refused: Mapping[int, Failure], footprint: Footprint, vocab_size: int, device: str
) -> dict[int, Failure]:
    """Operations with a sequence for which some rank lacks the memory. All ranks call it, with the same plan,
    and come to the same; what a token takes they may have measured differently.

    Args:
        refused: operations that do not run in any case.
    """
    longest = longest_split(work, refused)
    if not longest:
        return {}
    ranks = dist.get_world_size()
    needs = [needed(footprint, tokens, vocab_size, ranks) for tokens in longest.values()]
    # What is kept for later is in pieces, of which none may be large enough; and ranks of one machine count
    # what all of them have given back.
    free_cache()
    meet(device)
    free, *negated = least([free_memory(device), *(-need for need in needs)], device)
    found = {}
    for (op, tokens), need in zip(longest.items(), negated, strict=True):
        if -need > free:
            found[op] = failure(
                Internal(
                    f"out of device memory on one sequence of {tokens} tokens, which all ranks compute "
                    f"together: each needs {-need / GIB:.2f} GiB and one has {free / GIB:.2f}; send shorter "
                    "data, or free memory of the device or machine that others use",
                    OUT_OF_MEMORY,
                )
            )
            log.warning("operation %d of %s: %s", work.ops[op].seq_id, work.ops[op].model_id, found[op])
    return found


def taken_everywhere(take: Callable[[], None], give_back: Callable[[], None], device: str) -> bool:
    """Whether all ranks took memory, of the device or the host; otherwise none has any of it. One that finds
    none tries again once it keeps nothing for later. All ranks call it.

    Args:
        take: takes it, all or a part.
        give_back: lets go of what was taken, and of what else is kept for later.

    Raises:
        Exception: of something else than memory.
    """
    has_it = _takes(take, give_back) or _takes(take, give_back)
    (refused,) = any_rank([not has_it], device)
    if refused and has_it:
        give_back()
        free_cache()
    return not refused


def _takes(take: Callable[[], None], give_back: Callable[[], None]) -> bool:
    try:
        take()
    except Exception as error:
        if is_of_device(error) or not is_out_of_memory(error):
            raise
        _NONE.failed("memory", error)
    else:
        return True
    # Only here has the error let go of what it came up beside.
    give_back()
    free_cache()
    return False
