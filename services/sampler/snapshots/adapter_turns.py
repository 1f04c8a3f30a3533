"""Which adapters are in the engine: pure decisions, no clock and no waiting.

An engine step serves a limited number of different adapters, and vLLM passes over a request for another one
as long as those before it have requests: with a steady stream for each slot the next adapter would wait for
ever. So no more adapters than there are slots are let into the engine at once, and they take turns.

Invariants: the requests that run are of no more adapters than there are slots. Nobody starves: an adapter
that others wait for takes on nothing new after its turn, the one first that has had its slot longest, and the
next one too if that does not fall free within another turn; a slot that falls free goes to the adapter whose
request has waited longest.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from services.sampler.engine.snapshot_key import SnapshotKey
from services.sampler.snapshots.turns import Run, Wait

TURN_S = 2.0
"""A change costs no swap, only that the adapter's batch runs out; the other slots go on meanwhile."""


@dataclass
class _Slot:
    began: float
    running: set[int] = field(default_factory=set)
    closed_at: float | None = None

    @property
    def closed(self) -> bool:
        return self.closed_at is not None


class AdapterTurns:
    """The adapter requests of one engine. Times are seconds of one monotonic clock.

    Each method but `decide` is an event; call `decide` after it, until it answers `Wait`.

    Args:
        slots: adapters that one engine step serves.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        # In the order in which they got their slots.
        self._active: dict[SnapshotKey, _Slot] = {}
        # Adapters in the order in which their requests began to wait.
        self._waiting: dict[SnapshotKey, dict[int, None]] = {}
        self._adapter_of: dict[int, SnapshotKey] = {}

    @property
    def waiting(self) -> int:
        """Requests that do not run yet."""
        return sum(len(tickets) for tickets in self._waiting.values())

    def is_open(self, adapter: SnapshotKey) -> bool:
        """Whether a request for it would run at once."""
        slot = self._active.get(adapter)
        return len(self._active) < self._slots if slot is None else not slot.closed

    def arrive(self, ticket: int, adapter: SnapshotKey) -> None:
        """A new request."""
        self._adapter_of[ticket] = adapter
        self._waiting.setdefault(adapter, {})[ticket] = None

    def leave(self, ticket: int) -> None:
        """A request is done or given up, whether it ran or not."""
        adapter = self._adapter_of.pop(ticket)
        tickets = self._waiting.get(adapter, {})
        if ticket in tickets:
            del tickets[ticket]
            if not tickets:
                del self._waiting[adapter]
            return
        slot = self._active[adapter]
        slot.running.remove(ticket)
        if not slot.running:
            del self._active[adapter]

    def decide(self, now: float) -> Run | Wait:
        """What to do now."""
        wait = self._close(now)
        for adapter in self._waiting:
            if self.is_open(adapter):
                tickets = self._waiting.pop(adapter)
                self._active.setdefault(adapter, _Slot(now)).running.update(tickets)
                return Run(tuple(tickets))
        return wait

    def _close(self, now: float) -> Wait:
        """Closes as many slots as adapters wait for one in vain, but none within its turn; and others for
        those that then take longer than a turn to fall free: a sample may be of an hour."""
        free = self._slots - len(self._active)
        wanted = sum(adapter not in self._active for adapter in self._waiting) - free
        until = None
        for slot in self._active.values():
            over = slot.began + TURN_S
            if wanted <= 0:
                slot.closed_at = None
                continue
            if now >= over:
                if slot.closed_at is None:
                    slot.closed_at = now
                over = slot.closed_at + TURN_S
                wanted -= now < over
            if now < over:
                until = over if until is None else min(until, over)
        return Wait(until)
