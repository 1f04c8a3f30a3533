"""Which adapters are in the engine: pure decisions, no clock and no waiting.

An engine step serves a limited number of different adapters, and vLLM passes over a request for another one
as long as those before it have requests: with a steady stream for each slot the next adapter would wait for
ever. So no more adapters than there are slots are let into the engine at once, and they take turns.

A request that runs may go on with another adapter, which it waits for while it runs. It then holds the slots
of both until it has left the first one; where all that run in a slot wait for the same other one, and there
is no slot for that, it takes over theirs.

Invariants: the requests that run are of no more adapters than there are slots. Nobody starves: an adapter
that others wait for takes on nothing new after its turn, the one first that has had its slot longest, and the
next one too if that does not fall free within another turn; a slot that falls free goes to the adapter whose
request has waited longest. A slot that was taken over has had its turn since it was first given; and who goes
on with an adapter that takes on nothing new enters all the same, because that frees another slot sooner.
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
        # Of requests that run and wait for another adapter, or hold its slot too.
        self._next_of: dict[int, SnapshotKey] = {}

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

    def change(self, ticket: int, adapter: SnapshotKey) -> None:
        """A request that runs is to go on with another adapter. Once it runs with that too, it needs a
        `changed`."""
        self._next_of[ticket] = adapter
        self._waiting.setdefault(adapter, {})[ticket] = None

    def changed(self, ticket: int) -> None:
        """A request has left its former adapter."""
        adapter = self._adapter_of[ticket] = self._next_of.pop(ticket)
        self._free(ticket, but=adapter)

    def leave(self, ticket: int) -> None:
        """A request is done or given up, whether it ran or not."""
        adapter = self._adapter_of.pop(ticket)
        adapter = self._next_of.pop(ticket, adapter)
        if ticket in (tickets := self._waiting.get(adapter, {})):
            del tickets[ticket]
            if not tickets:
                del self._waiting[adapter]
        self._free(ticket)

    def _free(self, ticket: int, but: SnapshotKey | None = None) -> None:
        for adapter, slot in list(self._active.items()):
            if adapter != but:
                slot.running.discard(ticket)
                if not slot.running:
                    del self._active[adapter]

    def decide(self, now: float) -> Run | Wait:
        """What to do now."""
        wait = self._close(now)
        for adapter, tickets in self._waiting.items():
            if self.is_open(adapter):
                return self._run(adapter, list(tickets), now)
            changing = [ticket for ticket in tickets if ticket in self._next_of]
            if changing and (adapter in self._active or self._take_over(adapter, set(changing))):
                return self._run(adapter, changing, now)
        return wait

    def _run(self, adapter: SnapshotKey, tickets: list[int], now: float) -> Run:
        waiting = self._waiting[adapter]
        for ticket in tickets:
            del waiting[ticket]
        if not waiting:
            del self._waiting[adapter]
        self._active.setdefault(adapter, _Slot(now)).running.update(tickets)
        return Run(tuple(tickets))

    def _take_over(self, adapter: SnapshotKey, changing: set[int]) -> bool:
        """Gives an adapter the slot of one whose requests all go on with it."""
        for left, slot in self._active.items():
            if slot.running <= changing:
                # In the place that it had.
                self._active = {
                    adapter if each is left else each: slot for each, slot in self._active.items()
                }
                return True
        return False

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
