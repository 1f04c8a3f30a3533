"""Which snapshots an engine holds, and which one gives way: pure decisions, no input or output.

Invariants: a snapshot that a request uses or waits for is never evicted, and an adapter id is never given
twice, so a late message about an evicted adapter cannot touch another one.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass

from services.sampler.engine.snapshot_key import SnapshotKey


@dataclass
class _Resident:
    adapter_id: int
    nbytes: int
    users: int = 0


class Residency:
    """Snapshots in memory, least recently used first."""

    def __init__(self, budget_bytes: int, first_adapter_id: int) -> None:
        """
        Args:
            budget_bytes: bytes of tensors to keep. Snapshots in use or waited for, and the
                newest, stay even when they alone exceed it.
            first_adapter_id: ids count up from here.
        """
        self._budget = budget_bytes
        self._next_id = first_adapter_id
        self._residents: OrderedDict[SnapshotKey, _Resident] = OrderedDict()
        self._awaited: Counter[SnapshotKey] = Counter()

    def new_adapter_id(self) -> int:
        """An id that was never given before."""
        self._next_id += 1
        return self._next_id - 1

    def wait_for(self, key: SnapshotKey) -> None:
        """A request waits for a snapshot: once it is there it stays until the request had its turn.

        Otherwise snapshots that do not fit together could evict each other for ever before any is used.
        Every wait needs one `stop_waiting`.
        """
        self._awaited[key] += 1

    def stop_waiting(self, key: SnapshotKey) -> None:
        """The request uses the snapshot now, or gave up."""
        self._awaited[key] -= 1
        if not self._awaited[key]:
            del self._awaited[key]

    def acquire(self, key: SnapshotKey) -> int | None:
        """Adapter id of a resident snapshot, now in use and most recently used; None on a miss.

        Every successful acquire needs one release.
        """
        resident = self._residents.get(key)
        if resident is None:
            return None
        resident.users += 1
        self._residents.move_to_end(key)
        return resident.adapter_id

    def holds(self, key: SnapshotKey) -> bool:
        """Whether the snapshot is resident."""
        return key in self._residents

    def release(self, key: SnapshotKey) -> None:
        """Ends one use."""
        self._residents[key].users -= 1

    def add(self, key: SnapshotKey, adapter_id: int, nbytes: int) -> list[int]:
        """Notes that the engine now holds a snapshot; returns the adapter ids to drop.

        A snapshot that is resident already stays as it is (it is immutable) and the new copy is
        what to drop.
        """
        if key in self._residents:
            return [adapter_id]
        self._residents[key] = _Resident(adapter_id, nbytes)
        return self._evict(keep=key)

    def _evict(self, keep: SnapshotKey) -> list[int]:
        used = sum(resident.nbytes for resident in self._residents.values())
        dropped = []
        for key, resident in list(self._residents.items()):
            if used <= self._budget:
                break
            if resident.users == 0 and key not in self._awaited and key != keep:
                del self._residents[key]
                used -= resident.nbytes
                dropped.append(resident.adapter_id)
        return dropped

    def keys(self) -> list[SnapshotKey]:
        """Resident snapshots, least recently used first."""
        return list(self._residents)
