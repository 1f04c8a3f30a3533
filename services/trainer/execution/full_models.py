"""How many full models stay on the trainer, and when their state becomes durable.

Invariant: a full model takes the memory of its weights, their gradient and the optimizer's state, so only so
many are here at once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.common.contract.errors import Overloaded
from services.trainer.execution.resident_models import Model
from services.trainer.execution.room import Leave, Room

SNAPSHOT_BYTES = 512 * 1024**2
"""Bytes of operations after which a snapshot is due whatever the steps: far below the journal's bound."""


def snapshot_due(model: Model, every: int) -> bool:
    """Whether the state after a step should become durable now.

    An adapter's always. A full model's after `every` steps, or when the journal has grown large.
    """
    return not model.is_full or model.unsaved_steps >= every or model.unsaved_bytes >= SNAPSHOT_BYTES


class FullModels:
    """Makes room for full models.

    Args:
        models: the trainer's models by id.
        most: full models that may be here at once.
        park: has an idle model leave, its durable snapshot up to date; whether it did.
    """

    def __init__(self, models: dict[str, Model], most: int, park: Leave) -> None:
        self._room = Room(models, most, lambda model: int(model.is_full), park)

    @asynccontextmanager
    async def room(self, model_id: str) -> AsyncIterator[None]:
        """Holds room for a full model that is made within the context.

        Raises:
            Overloaded: all full models stayed in use for a minute.
        """
        async with self._room.hold(model_id, 1, self._all_in_use):
            yield

    def _all_in_use(self) -> Overloaded:
        return Overloaded(
            f"all {self._room.most} models that train all weights on this trainer are in use; unload one, "
            "try again later, or have the operator raise --max-full-models",
            "full_models_in_use",
        )
