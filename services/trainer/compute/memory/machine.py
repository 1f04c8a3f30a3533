"""What a rank has of its machine and its GPU, beside the other ranks and whoever else is there.

Invariant: ranks of one machine together take no more of it than their share.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from services.common.contract.errors import InvalidRequest
from services.common.process.process import machine_memory
from services.trainer.compute.memory.capacity import GIB

OF_THE_MACHINE = 0.75
"""Of a machine's memory the ranks on it take so much, unless they are told: other processes run there too."""

OF_THE_HOST = 0.25
"""The same of adapters that are idle, beside ranks that compute on devices."""

OF_COPIES = 1 / 16
"""The same of copies of models that the first rank has on their way to samplers, and as much again of those
on their way to a storage."""

OF_LOADS = 1 / 32
"""The same of states that are loaded from checkpoints, and as much again of those that models come back
from."""

OF_AN_OPERATION = 1 / 8
"""The same of the data of one operation on the first rank, beside ranks that compute on devices."""

OF_RESULTS = 1 / 64
"""The same of results that the first rank keeps for those who ask again."""


def ranks_here() -> int:
    """Ranks that share this machine's memory. Of a world on several, its agent says how many it has."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def of_machine(part: float) -> int:
    """Bytes of a part of this machine's memory, whatever the device."""
    return int(machine_memory() * part)


def own_memory(device: str) -> int:
    """What this rank may take when nobody says: of its GPU what others leave, or its share of the machine."""
    if device == "cpu":
        return of_machine(OF_THE_MACHINE) // ranks_here()
    return gpu_memory()


def host_memory(given: int | None, device: str) -> int:
    """What this rank may take of its host for adapters that are idle: what was given, or else its share.

    Raises:
        InvalidRequest: the machine has less.
    """
    if given is None:
        return 0 if device == "cpu" else of_machine(OF_THE_HOST) // ranks_here()
    if given * ranks_here() > machine_memory():
        raise InvalidRequest(
            f"--adapter-host-gib {given / GIB:g} is more than this machine has, which is "
            f"{machine_memory() / GIB:.1f} GiB for {ranks_here()} ranks; give less"
        )
    return given


def operation_memory(memory: int, device: str) -> int:
    """Bytes that the data of one operation may take of this rank's host: its part of the machine, or, where
    that is the device, a quarter of `memory`, which is what the rank may take of it."""
    return memory // 4 if device == "cpu" else of_machine(OF_AN_OPERATION)


def keep_to_share(share: float) -> None:
    """Lets this process take no more than a fraction of its GPU's memory, but for CUDA's own: an allocation
    beyond it is one that does not fit, whatever else is free."""
    torch.cuda.set_per_process_memory_fraction(share)


def gpu_memory() -> int:
    """Bytes of its GPU that this process has, or could have: its share, as far as others leave it."""
    free, total = torch.cuda.mem_get_info()
    share = int(total * torch.cuda.get_per_process_memory_fraction())
    return min(free + torch.cuda.memory_reserved(), share)
