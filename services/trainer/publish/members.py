"""Who is in a weight group: the trainer as rank 0, and each sampler with the ranks of its workers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from services.common import weights
from services.common.process.threads import WorkerThread
from services.common.state.registry import ServiceRecord


@dataclass(frozen=True)
class Member:
    """One sampler replica; a restarted one is another member."""

    record: ServiceRecord

    @property
    def key(self) -> tuple[str, str]:
        """What it is told by from others."""
        return self.record.id, self.record.incarnation

    @property
    def gpus(self) -> tuple[str, ...]:
        """GPU of each worker, "" for one on a CPU."""
        return self.record.gpus or ("",) * self.record.world_size

    def __str__(self) -> str:
        return self.record.id


@dataclass(frozen=True)
class Group:
    """One that came together. `thread`: where this end sends."""

    members: tuple[Member, ...]
    handle: weights.WeightGroup
    thread: WorkerThread


def first_ranks(members: Sequence[Member]) -> list[int]:
    """Rank of each member's first worker; and after the last one's, how many ranks there are."""
    return list(accumulate((member.record.world_size for member in members), initial=1))


def of_ranks(members: Sequence[Member], ranks: Collection[int]) -> list[bool]:
    """Of each member, whether one of these ranks is a worker of it."""
    starts = first_ranks(members)
    return [any(start <= rank < end for rank in ranks) for start, end in pairwise(starts)]
