"""Which full snapshots are kept in host memory, ready to be put into the engine: pure decisions.

Invariant: what is kept never exceeds the budget, also while a snapshot arrives; a stage id is never given
twice. A snapshot that is not kept is read from the snapshot store instead.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from services.sampler.engine.snapshot_key import SnapshotKey, Weights


@dataclass
class _Staged:
    stage_id: int
    nbytes: int
    complete: bool = False


class Staging:
    """Full snapshots in host memory, least recently used first.

    Args:
        budget_bytes: of all copies together.
        copies: workers of the engine; each keeps one.
    """

    def __init__(self, budget_bytes: int, copies: int) -> None:
        self._budget = budget_bytes
        self._copies = copies
        self._next_id = 1
        self._staged: OrderedDict[SnapshotKey, _Staged] = OrderedDict()

    def reserve(self, key: SnapshotKey, nbytes: int, used: Weights = None) -> tuple[int | None, list[int]]:
        """Makes room for a snapshot of `nbytes` that is about to arrive.

        Args:
            used: what is on its way into the engine, and stays.

        Returns:
            (the id to keep it under, or None when it is not to be kept; the ids to drop before).
        """
        size = nbytes * self._copies
        if key in self._staged or size > self._budget:
            return None, []
        dropped = []
        for other in list(self._staged):
            if self._used() + size <= self._budget:
                break
            if self._staged[other].complete and other != used:
                dropped.append(self._staged.pop(other).stage_id)
        if self._used() + size > self._budget:
            return None, dropped
        self._staged[key] = _Staged(self._next_id, size)
        self._next_id += 1
        return self._staged[key].stage_id, dropped

    def complete(self, key: SnapshotKey) -> None:
        """A reserved snapshot has arrived on all workers."""
        self._staged[key].complete = True

    def cancel(self, key: SnapshotKey) -> int:
        """A reserved snapshot did not arrive. Returns the id to drop from workers that have it."""
        return self._staged.pop(key).stage_id

    def find(self, key: SnapshotKey) -> int | None:
        """Id of a snapshot that is kept, now most recently used; None when it is not."""
        staged = self._staged.get(key)
        if staged is None or not staged.complete:
            return None
        self._staged.move_to_end(key)
        return staged.stage_id

    def keys(self) -> list[SnapshotKey]:
        """Snapshots that are kept, least recently used first."""
        return [key for key, staged in self._staged.items() if staged.complete]

    def _used(self) -> int:
        return sum(staged.nbytes for staged in self._staged.values())
