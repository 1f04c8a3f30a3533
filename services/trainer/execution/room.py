"""Room that models share: when another one is to come and there is none left, those that have been idle
longest are parked.

A parked model's durable snapshot is brought up to date and it is dropped. Its next operation finds it gone,
and the gateway has it restored.

Invariants: what is here, and what is being made, never takes more than there is; a model with unfinished
operations is never parked, and whatever is lost by dropping one is in its durable snapshot or in the journal
after it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager

from services.common.contract.errors import Overloaded
from services.trainer.execution.resident_models import Model

log = logging.getLogger(__name__)

IDLE_S = 5.0
"""A model that was used so lately is not parked, so that a restored one gets to run what it came for."""

_WAIT_S = 60.0
_LOOK_AGAIN_S = 0.2


def longest_idle(models: Iterable[Model], now: float) -> Model | None:
    """The model to park; None when all are in use.

    Args:
        models: those of the kind that room is wanted for.
        now: `time.monotonic()`.
    """
    idle = [
        model for model in models if model.created and not model.is_busy and now - model.last_used >= IDLE_S
    ]
    return min(idle, key=lambda model: model.last_used, default=None)


class Room:
    """What models of one kind share.

    Args:
        models: the trainer's models by id.
        most: what there is of it.
        taken_by: what a model takes; 0: it is of another kind.
        save: brings a model's durable snapshot up to date.
        drop: takes a model out of `models` and off the engine.
    """

    def __init__(
        self,
        models: dict[str, Model],
        most: int,
        taken_by: Callable[[Model], int],
        save: Callable[[Model], Awaitable[None]],
        drop: Callable[[Model], Awaitable[None]],
    ) -> None:
        self._models = models
        self.most = most
        self._taken_by = taken_by
        self._save = save
        self._drop = drop
        self._held = 0
        """By models that are being made."""

    def used(self) -> int:
        """What models take at present."""
        return self._held + sum(map(self._taken_by, self._models.values()))

    @asynccontextmanager
    async def hold(self, size: int, full: Callable[[], Overloaded]) -> AsyncIterator[None]:
        """Holds room for a model that is made within the context.

        Args:
            size: at most `most`.
            full: the error when the others stayed in use for a minute.
        """
        deadline = time.monotonic() + _WAIT_S
        while self.used() + size > self.most:
            taking = [model for model in self._models.values() if self._taken_by(model)]
            idle = longest_idle(taking, time.monotonic())
            if idle is not None and await self._park(idle):
                continue
            if time.monotonic() >= deadline:
                raise full()
            await asyncio.sleep(_LOOK_AGAIN_S)
        self._held += size
        try:
            yield
        finally:
            self._held -= size

    async def _park(self, model: Model) -> bool:
        """Whether the model is gone."""
        await self._save(model)
        if self._models.get(model.model_id) is not model:
            return True
        if model.is_busy:
            return False
        await self._drop(model)
        log.info("parked %s to make room", model.model_id)
        return True
