"""Room that models share: when another one is to come and there is none left, those that have been idle
longest are parked.

A parked model's durable snapshot is brought up to date and it is dropped. Its next operation finds it gone,
and the gateway has it restored. Adapters may go to the host instead (host_room.py).

Invariants: what is here, and what is being made, never takes more than there is; a model with unfinished
operations is never parked, and whatever is lost by dropping one is in its durable snapshot or in the journal
after it. Models leave for the one that has waited longest, and what frees itself meanwhile is its too: small
ones would take, one after the other, what a large one waits for. What it found free is anybody's. One that
has waited in vain and asks again soon has waited since it first asked: else who comes late would pass it.
"""

from __future__ import annotations

import asyncio
import bisect
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
_REMEMBERED = 1024
_REMEMBERED_S = 60.0
"""Of so many that waited in vain, and for so long, is it known where they waited: who still wants the model
asks again within seconds."""
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
        since: when it asked, or first asked.
        comes: set when it may be the first.
    """

    size: int
    since: float
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
        """Of those that wait, in the order in which they first came."""
        self._spare: int | None = None
        """What others than the first of them may have yet of what was free when it became that; None = nobody
        has looked since. Who gets before it with an earlier turn finds what it found."""
        self._since: dict[str, tuple[float, float]] = {}
        """Of models that waited in vain, in that order: since when, and until when that is remembered."""
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
        self,
        model_id: str,
        size: int,
        full: Callable[[], Overloaded],
        wanted: Callable[[], bool] = lambda: True,
    ) -> AsyncIterator[bool]:
        """Holds room for a model that is made within the context; whether it does: not for one that nobody
        wants any more.

        Args:
            model_id: the model's, which waits where it did when it lately waited in vain.
            size: at most `most`.
            full: the error when the others stayed in use for a minute, or their snapshots to be written.
            wanted: whether the model is still to be made; asked again and again.
        """
        held = await self._take(model_id, size, full, wanted)
        try:
            yield held
        finally:
            self._held -= size if held else 0

    async def _take(
        self, model_id: str, size: int, full: Callable[[], Overloaded], wanted: Callable[[], bool]
    ) -> bool:
        until, mine = deadline(), _Turn(size, self._first_asked(model_id, time.monotonic()))

        def waits() -> bool:
            return wanted() and time.monotonic() < until

        bisect.insort(self._turns, mine, key=lambda turn: turn.since)
        try:
            while wanted():
                if self._takes(mine):
                    return True
                if self._turns[0] is mine and await self.make_way(waits):
                    continue
                if time.monotonic() >= until:
                    self._remember(model_id, mine.since, time.monotonic())
                    raise full()
                mine.comes.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_AGAIN_S):
                        await mine.comes.wait()
            return False
        finally:
            if self._turns[0] is mine:
                self._spare = None
            self._turns.remove(mine)
            if self._turns:
                self._turns[0].comes.set()

    def _first_asked(self, model_id: str, now: float) -> float:
        since, until = self._since.pop(model_id, (now, now))
        return since if now < until else now

    def _remember(self, model_id: str, since: float, now: float) -> None:
        self._since[model_id] = since, now + _REMEMBERED_S
        if len(self._since) > _REMEMBERED:
            del self._since[next(iter(self._since))]

    def _takes(self, mine: _Turn) -> bool:
        """Takes what one waits for, if there is so much for it; whether it did."""
        first, now = self._turns[0], time.monotonic()
        if mine is not first and self._spare is not None and now < self._seen_until:
            seen = beside(self._seen, first.size, self._spare)
            if mine.size > seen:
                return False
        free = self._seen = self.most - self.used()
        self._seen_until = now + _SEEN_S
        if self._spare is None:
            self._spare = free
        if mine.size > (free if mine is first else beside(free, first.size, self._spare)):
            return False
        self._spare -= mine.size
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
