"""Room that models share: when another one is to come and there is none left, those that have been idle
longest are parked.

A parked model's durable snapshot is brought up to date and it is dropped. Its next operation finds it gone,
and the gateway has it restored. Adapters may go to the host instead (host_room.py).

Invariants: what is here, and what is being made, never takes more than there is; a model with unfinished
operations is never parked, and whatever is lost by dropping one is in its durable snapshot or in the journal
after it. Models leave for the one that has waited longest, and what frees itself meanwhile is its too: small
ones would take, one after the other, what a large one waits for. What it found free is anybody's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from services.common.contract.errors import Overloaded
from services.trainer.execution.resident_models import Model

log = logging.getLogger(__name__)

IDLE_S = 5.0
"""A model that was used so lately is not parked, so that a restored one gets to run what it came for."""

_WAIT_S = 60.0
_LOOK_AGAIN_S = 0.2
_SEEN_S = 0.1
"""For so long what was seen to be free answers who finds that too little."""

Leave = Callable[[Model, Callable[[], bool]], Awaitable[bool]]
"""Has an idle model do what it does before its room is another's; whether it did. It asks again and again
whether that is still wanted: its durable snapshot is written after others', and they may take any time."""


def deadline() -> float:
    """Until when one that asks now waits, by `time.monotonic()`."""
    return time.monotonic() + _WAIT_S


def longest_idle(models: Iterable[Model], now: float, idle_s: float = IDLE_S) -> Model | None:
    """The model to park; None when all are in use.

    Args:
        models: those of the kind that room is wanted for.
        now: `time.monotonic()`.
        idle_s: for how long at least.
    """
    idle = [
        model
        for model in models
        if model.created and not model.is_busy and not model.leaving and now - model.last_used >= idle_s
    ]
    return min(idle, key=lambda model: model.last_used, default=None)


def beside(free: int, first: int, spare: int) -> int:
    """What others may have of what is free, while one has waited longest. Pure.

    Args:
        first: what that one waits for.
        spare: what is left of what it found free, and could not do with.
    """
    return free - first if free >= first else min(free, spare)


@dataclass
class _Turn:
    """Of one that waits for room.

    Attributes:
        size: what it waits for.
        spare: what others may have yet of what was free when it became the first of those that wait; None =
            it is not, or nobody has looked since.
        comes: set when it may be the first.
    """

    size: int
    spare: int | None = None
    comes: asyncio.Event = field(default_factory=asyncio.Event)


class Room:
    """What models of one kind share.

    Args:
        models: the trainer's models by id.
        most: what there is of it.
        taken_by: what a model takes; 0: it is of another kind, or not there.
        leave: has an idle model give its room up; whether it did.
        idle_s: for how long one is not used before it is asked to.
    """

    def __init__(
        self,
        models: dict[str, Model],
        most: int,
        taken_by: Callable[[Model], int],
        leave: Leave,
        idle_s: float = IDLE_S,
    ) -> None:
        self._models = models
        self.most = most
        self._taken_by = taken_by
        self._leave = leave
        self._idle_s = idle_s
        self._turns: list[_Turn] = []
        """Of those that wait, in the order in which they came."""
        self._held = 0
        """By models that are being made."""
        self._seen, self._seen_until = 0, -math.inf
        """What was free when somebody last looked: with a thousand that wait, each of which looks again and
        again, to add up what all of a thousand models take costs more than a core has."""

    def used(self) -> int:
        """What models take at present."""
        return self._held + sum(map(self._taken_by, self._models.values()))

    @asynccontextmanager
    async def hold(
        self, size: int, full: Callable[[], Overloaded], wanted: Callable[[], bool] = lambda: True
    ) -> AsyncIterator[bool]:
        """Holds room for a model that is made within the context; whether it does: not for one that nobody
        wants any more.

        Args:
            size: at most `most`.
            full: the error when the others stayed in use for a minute, or their snapshots to be written.
            wanted: whether the model is still to be made; asked again and again.
        """
        held = await self._take(size, full, wanted)
        try:
            yield held
        finally:
            self._held -= size if held else 0

    async def _take(self, size: int, full: Callable[[], Overloaded], wanted: Callable[[], bool]) -> bool:
        until, mine = deadline(), _Turn(size)

        def waits() -> bool:
            return wanted() and time.monotonic() < until

        self._turns.append(mine)
        try:
            while wanted():
                if self._takes(mine):
                    return True
                if self._turns[0] is mine and await self.make_way(waits):
                    continue
                if time.monotonic() >= until:
                    raise full()
                mine.comes.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_AGAIN_S):
                        await mine.comes.wait()
            return False
        finally:
            self._turns.remove(mine)
            if self._turns:
                self._turns[0].comes.set()

    def _takes(self, mine: _Turn) -> bool:
        """Takes what one waits for, if there is so much for it; whether it did."""
        first, now = self._turns[0], time.monotonic()
        if mine is not first and first.spare is not None and now < self._seen_until:
            seen = beside(self._seen, first.size, first.spare)
            if mine.size > seen:
                return False
        free = self._seen = self.most - self.used()
        self._seen_until = now + _SEEN_S
        if first.spare is None:
            first.spare = free
        if mine.size > (free if mine is first else beside(free, first.size, first.spare)):
            return False
        first.spare -= mine.size
        self._held += mine.size
        return True

    async def make_way(self, wanted: Callable[[], bool]) -> bool:
        """Has the model that is idle longest give its room up; whether there is one, and it did while that
        was wanted."""
        taking = [model for model in self._models.values() if self._taken_by(model)]
        idle = longest_idle(taking, time.monotonic(), self._idle_s)
        if idle is None or not await self._leave(idle, wanted):
            return False
        log.info("%s made room", idle.model_id)
        return True
