"""Which full models stay on the trainer, and when their state becomes durable.

A full model takes the memory of its weights, their gradient and the optimizer's state, so only so many are
here at once. When one more is to come, the one that has been idle longest is parked: its durable snapshot
is brought up to date and it is dropped. Its next operation finds it gone, and the gateway has it restored.

Invariant: a model with unfinished operations is never parked, and whatever is lost by dropping one is in its
durable snapshot or in the journal after it.
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

SNAPSHOT_BYTES = 512 * 1024**2
"""Bytes of operations after which a snapshot is due whatever the steps: far below the journal's bound."""

_WAIT_S = 60.0
_LOOK_AGAIN_S = 0.2


def snapshot_due(model: Model, every: int) -> bool:
    """Whether the state after a step should become durable now.

    An adapter's always. A full model's after `every` steps, or when the journal has grown large.
    """
    return not model.is_full or model.unsaved_steps >= every or model.unsaved_bytes >= SNAPSHOT_BYTES


def longest_idle(models: Iterable[Model], now: float) -> Model | None:
    """The full model to park; None when all are in use.

    Args:
        now: `time.monotonic()`.
    """
    idle = [
        model for model in models if model.is_full and not model.is_busy and now - model.last_used >= IDLE_S
    ]
    return min(idle, key=lambda model: model.last_used, default=None)


class FullModels:
    """Makes room for full models.

    Args:
        models: the trainer's models by id.
        most: full models that may be here at once.
        save: brings a model's durable snapshot up to date.
        drop: takes a model out of `models` and off the engine.
    """

    def __init__(
        self,
        models: dict[str, Model],
        most: int,
        save: Callable[[Model], Awaitable[None]],
        drop: Callable[[Model], Awaitable[None]],
    ) -> None:
        self._models = models
        self._most = most
        self._save = save
        self._drop = drop
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def room(self) -> AsyncIterator[None]:
        """Holds room for a full model that is made within the context.

        Raises:
            Overloaded: all full models stayed in use for a minute.
        """
        async with self._lock:
            deadline = time.monotonic() + _WAIT_S
            while sum(model.is_full for model in self._models.values()) >= self._most:
                idle = longest_idle(self._models.values(), time.monotonic())
                if idle is not None:
                    await self._park(idle)
                elif time.monotonic() < deadline:
                    await asyncio.sleep(_LOOK_AGAIN_S)
                else:
                    raise Overloaded(
                        f"all {self._most} models that train all weights on this trainer are in use; unload "
                        "one, try again later, or have the operator raise --max-full-models",
                        "full_models_in_use",
                    )
            yield

    async def _park(self, model: Model) -> None:
        await self._save(model)
        if model.is_busy or self._models.get(model.model_id) is not model:
            return
        await self._drop(model)
        log.info("parked %s to make room", model.model_id)
