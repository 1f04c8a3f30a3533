"""How many processes compute, and which cores and GPUs each one gets: pure functions of what the machine has.

Invariant: the OpenMP threads of all processes together are no more than the cores (they spin while
they wait, so two processes on one core slow each other many times over), and the ranks of one
process are on different GPUs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

_ALONE = 0.9
_SHARED = 0.8
BESIDE = 0.05
"""Of a GPU that several processes share: what CUDA takes for them, beside what they ask it for."""


@dataclass(frozen=True)
class Place:
    """Where one process computes.

    Attributes:
        threads: OpenMP threads of each of its ranks.
        cores: CPUs it is bound to; empty = any.
        gpus: one for each rank; empty = it computes on the CPU.
        gpu_memory: fraction of its GPUs' memory that is its own, less what it must leave to others.
        shared: another process is on one of its GPUs.
    """

    threads: int
    cores: tuple[int, ...] = ()
    gpus: tuple[str, ...] = ()
    gpu_memory: float = _ALONE
    shared: bool = False


@dataclass(frozen=True)
class Counts:
    """Ranks of each model's trainer, and each model's samplers."""

    ranks: int
    samplers: int


def counts(*, models: int, gpus: int, sampler_gpus: int, ranks: int | None, samplers: int | None) -> Counts:
    """How many processes share a machine's GPUs; what is None is decided.

    Every model has an equal part of the GPUs. Half of it samples, in whole replicas, and the rest
    trains: a step of reinforcement learning spends its time in about equal parts on both. One GPU is
    for both.

    Args:
        gpus: 0 = everything computes on the CPU.
        sampler_gpus: of each sampler.
    """
    part = gpus // max(models, 1)
    if samplers is None:
        left = part // 2 if ranks is None else part - ranks
        samplers = max(1, left // sampler_gpus)
    if ranks is None:
        ranks = max(1, part - samplers * sampler_gpus)
    return Counts(ranks, samplers)


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
    crowds = [max(users[gpu] for gpu in group) for group in chosen]
    return [
        Place(threads, gpus=group, gpu_memory=_fraction(crowd), shared=crowd > 1)
        for group, crowd in zip(chosen, crowds, strict=True)
    ]


def left_to_trainers(
    trainers: Sequence[Place], samplers: Sequence[tuple[Place, float]]
) -> list[float | None]:
    """Fraction of its GPUs' memory for each trainer, which is what samplers leave; None = it shares none.

    Args:
        samplers: with the fraction of its GPUs' memory that each has.
    """
    taken: defaultdict[str, float] = defaultdict(float)
    for place, memory in samplers:
        for gpu in place.gpus:
            taken[gpu] += memory
    crowds = Counter(gpu for place in trainers for gpu in place.gpus)
    return [
        round(max(0.0, min((1 - BESIDE - taken[gpu]) / crowds[gpu] for gpu in place.gpus)), 3)
        if place.shared
        else None
        for place in trainers
    ]


def _fraction(users: int) -> float:
    return _ALONE if users == 1 else round(_SHARED / users, 3)
