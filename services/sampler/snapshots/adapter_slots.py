"""Lets requests for adapters into the engine in turns.

Invariant: between the beginning and the end of `use` the adapter is one of at most as many as an engine step
serves; a request that gave up holds no slot.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.sampler.engine.snapshot_key import SnapshotKey
from services.sampler.snapshots.adapter_turns import AdapterTurns
from services.sampler.snapshots.turns import Run


class AdapterSlots:
    """The slots of one engine.

    Args:
        slots: adapters that one engine step serves.
    """

    def __init__(self, slots: int) -> None:
        self._turns = AdapterTurns(slots)
        self._numbers = itertools.count()
        self._entered: dict[int, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """Requests that wait for their adapter's turn."""
        return self._turns.waiting

    def is_open(self, adapter: SnapshotKey) -> bool:
        """Whether a request for it would not have to wait."""
        return self._turns.is_open(adapter)

    @asynccontextmanager
    async def use(self, adapter: SnapshotKey) -> AsyncIterator[int]:
        """Waits for the adapter's turn, and holds its slot meanwhile. Yields a ticket, for `change`."""
        ticket = next(self._numbers)
        entered = self._entered[ticket] = asyncio.get_running_loop().create_future()
        self._turns.arrive(ticket, adapter)
        self._go_on()
        try:
            await entered
            yield ticket
        finally:
            del self._entered[ticket]
            self._turns.leave(ticket)
            self._go_on()

    @asynccontextmanager
    async def change(self, ticket: int, adapter: SnapshotKey) -> AsyncIterator[None]:
        """In a `use`, waits for the turn of another adapter, and holds the slots of both meanwhile;
        afterwards only that of the other one. After an error or a cancellation the request has to leave."""
        entered = self._entered[ticket] = asyncio.get_running_loop().create_future()
        self._turns.change(ticket, adapter)
        self._go_on()
        await entered
        yield
        self._turns.changed(ticket)
        self._go_on()

    def _go_on(self) -> None:
        """Lets in who may enter now, and comes back when a turn ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while isinstance(decision := self._turns.decide(time.monotonic()), Run):
            for ticket in decision.tickets:
                if not self._entered[ticket].done():
                    self._entered[ticket].set_result(None)
        if decision.until is not None:
            later = decision.until - time.monotonic()
            self._timer = asyncio.get_running_loop().call_later(later, self._go_on)
