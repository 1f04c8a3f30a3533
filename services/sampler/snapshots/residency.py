"""Which snapshots an engine holds, and which one gives way: pure decisions, no input or output.

Invariants: a snapshot that a request uses or waits for is never evicted, and an adapter id is never given
twice, so a late message about an evicted adapter cannot touch another one. What is loaded ahead of its turn
fits the budget together with all that cannot give way. So what is held and loaded exceeds it by the adapters
of one engine step at most, which are loaded at their turn whatever waits, by those that requests in such a
step go on with, and by the newest received.
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
    used: bool = False


class Residency:
    """Snapshots in memory, least recently used first."""

    def __init__(self, budget_bytes: int, first_adapter_id: int, copies: int) -> None:
        """
        Args:
            budget_bytes: bytes of tensors to keep, of all workers. Snapshots in use or waited for, and the
                newest, stay even when they alone exceed it.
            first_adapter_id: ids count up from here.
            copies: workers that each keep up to all of what they load; until it is loaded, what is in the
                store once counts for so much.
        """
        self._budget = budget_bytes
        self._next_id = first_adapter_id
        self._copies = copies
        self._residents: OrderedDict[SnapshotKey, _Resident] = OrderedDict()
        self._awaited: Counter[SnapshotKey] = Counter()
        self._absent: dict[SnapshotKey, int] = {}
        """Bytes of what is waited for and not being loaded yet, in the order in which that began."""
        self._loading: dict[SnapshotKey, int] = {}

    def new_adapter_id(self) -> int:
        """An id that was never given before."""
        self._next_id += 1
        return self._next_id - 1

    def wait_for(self, key: SnapshotKey, stored: int) -> None:
        """A request waits for a snapshot: once it is there it stays until the request had its turn.

        Otherwise snapshots that do not fit together could evict each other for ever before any is used.
        Every wait needs one `stop_waiting`.

        Args:
            stored: its bytes in the store; of no meaning for one that is resident.
        """
        self._awaited[key] += 1
        if key not in self._residents and key not in self._loading:
            self._absent.setdefault(key, stored * self._copies)

    def stop_waiting(self, key: SnapshotKey) -> None:
        """The request had its turn, or gave up."""
        self._awaited[key] -= 1
        if not self._awaited[key]:
            del self._awaited[key]
            self._absent.pop(key, None)

    def ahead(self) -> list[SnapshotKey]:
        """What is to be loaded now, although it may not be its turn: those that have been waited for longest,
        as many as the budget has room for beside what cannot give way."""
        if not self._absent:
            # As for nearly every request: thousands may be resident.
            return []
        room = self._budget - sum(self._loading.values())
        room -= sum(one.nbytes for key, one in self._residents.items() if self._stays(key))
        found = []
        for key, nbytes in self._absent.items():
            room -= nbytes
            if room < 0:
                break
            found.append(key)
        return found

    def failed(self, key: SnapshotKey) -> None:
        """It could not be loaded: it is tried again at its turn, and not ahead of it."""
        self._absent.pop(key, None)

    def acquire(self, key: SnapshotKey) -> int | None:
        """Adapter id of a resident snapshot, now in use and most recently used; None on a miss.

        Every successful acquire needs one release.
        """
        resident = self._residents.get(key)
        if resident is None:
            return None
        resident.users += 1
        resident.used = True
        self._residents.move_to_end(key)
        return resident.adapter_id

    def holds(self, key: SnapshotKey) -> bool:
        """Whether the snapshot is resident."""
        return key in self._residents

    def release(self, key: SnapshotKey) -> None:
        """Ends one use."""
        self._residents[key].users -= 1

    def load(self, key: SnapshotKey, stored: int) -> list[int]:
        """A snapshot is about to be loaded, of so many bytes in the store; returns the adapter ids to drop
        before. Needs one `loaded`."""
        self._absent.pop(key, None)
        self._loading[key] = stored * self._copies
        return self._evict()

    def loaded(self, key: SnapshotKey) -> None:
        """The load has ended, well or not."""
        del self._loading[key]

    def add(self, key: SnapshotKey, adapter_id: int, nbytes: int) -> list[int]:
        """Notes that the engine now holds a snapshot, of so many bytes in all workers; returns the adapter
        ids to drop.

        A snapshot that was used stays as it is (it is immutable), and the new copy is what to drop. One that
        nobody has used gives way to it: a trainer that died before the first was stored may have come to
        other last bits, and the second is what the store has.
        """
        before = self._residents.get(key)
        if before is not None and before.used:
            return [adapter_id]
        self._residents[key] = _Resident(adapter_id, nbytes)
        self._absent.pop(key, None)
        return [*([before.adapter_id] if before is not None else ()), *self._evict(keep=key)]

    def _evict(self, keep: SnapshotKey | None = None) -> list[int]:
        used = sum(resident.nbytes for resident in self._residents.values()) + sum(self._loading.values())
        dropped = []
        for key, resident in list(self._residents.items()):
            if used <= self._budget:
                break
            if key != keep and not self._stays(key):
                del self._residents[key]
                used -= resident.nbytes
                dropped.append(resident.adapter_id)
        return dropped

    def _stays(self, key: SnapshotKey) -> bool:
        return self._residents[key].users > 0 or key in self._awaited

    def keys(self) -> list[SnapshotKey]:
        """Resident snapshots, least recently used first."""
        return list(self._residents)
