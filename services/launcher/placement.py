"""Which cores and GPUs each computing process gets: a pure function of what the machine has.

Invariant: the OpenMP threads of all processes together are no more than the cores (they spin while
they wait, so two processes on one core slow each other many times over), and the ranks of one
process are on different GPUs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_ALONE = 0.9
_SHARED = 0.8


@dataclass(frozen=True)
class Place:
    """Where one process computes.

    Attributes:
        threads: OpenMP threads of each of its ranks.
        cores: CPUs it is bound to; empty = any.
        gpus: one for each rank; empty = it computes on the CPU.
        gpu_memory: fraction of its GPUs' memory that is its own, less what it must leave to others.
    """

    threads: int
    cores: tuple[int, ...] = ()
    gpus: tuple[str, ...] = ()
    gpu_memory: float = _ALONE


def places(ranks: Sequence[int], cores: Sequence[int], gpus: Sequence[str]) -> list[Place]:
    """A place for each process, in order.

    Args:
        ranks: how many ranks each process has, at least 1; no more than GPUs, if there are any.
        cores: CPUs to share out. A process is bound to its share when each rank gets at least two:
            with one core a rank, letting the kernel choose leaves no core idle.
        gpus: GPUs to share out in turn; empty = compute on the CPU.
    """
    share = len(cores) // sum(ranks)
    threads = max(1, share)
    if not gpus:
        if share < 2:
            return [Place(threads) for _ in ranks]
        starts = [sum(ranks[:index]) * share for index in range(len(ranks))]
        return [
            Place(threads, tuple(cores[start : start + count * share]))
            for start, count in zip(starts, ranks, strict=True)
        ]
    chosen: list[tuple[str, ...]] = []
    position = 0
    for count in ranks:
        chosen.append(tuple(gpus[(position + rank) % len(gpus)] for rank in range(count)))
        position += count
    users = Counter(gpu for group in chosen for gpu in group)
    return [
        Place(threads, gpus=group, gpu_memory=_fraction(max(users[gpu] for gpu in group))) for group in chosen
    ]


def _fraction(users: int) -> float:
    return _ALONE if users == 1 else round(_SHARED / users, 3)
