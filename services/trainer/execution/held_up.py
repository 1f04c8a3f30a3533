"""Models whose next operation cannot run as they are: they could not be created, or are on the host.

Invariant: such an operation has its result, or its model is on its way back; none of another model waits
for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from services.common.contract.errors import Overloaded, TinsmithError, by_code
from services.common.contract.errors import to_pb as error_to_pb
from services.trainer.execution.control_ops import ControlOps
from services.trainer.execution.resident_models import Model, Operation, OperationResult

log = logging.getLogger(__name__)


class HeldUp:
    """Sees to them.

    Args:
        models: the trainer's models by id.
        finish: gives an operation its result.
        wake: called when a model may run again.
    """

    def __init__(
        self,
        models: dict[str, Model],
        control: ControlOps,
        finish: Callable[[Model, Operation, OperationResult], None],
        wake: Callable[[], None],
    ) -> None:
        self._models = models
        self._control = control
        self._finish = finish
        self._wake = wake
        self._stopping = False

    def see_to(self, tasks: asyncio.TaskGroup) -> None:
        """Fails what waits for a model that could not be created, and has those come back from the host that
        are wanted."""
        for model in self._models.values():
            if model.held:
                continue
            while model.broken is not None and model.sequence.ready:
                why = f"the model was not created: {model.broken.message}"
                self._fail_next(model, by_code(model.broken.code, model.broken.category, why))
            if model.is_wanted:
                model.held = True
                tasks.create_task(self._bring_back(model), name=f"{model.model_id} comes back")

    def stop(self) -> None:
        """Has none come back any more: what waits for room does not keep the trainer from ending."""
        self._stopping = True

    def _wants(self, model: Model) -> bool:
        """Whether a model that comes back is still the one that is here, and runs again."""
        return not self._stopping and self._models.get(model.model_id) is model

    async def _bring_back(self, model: Model) -> None:
        try:
            await self._control.bring_back(model, lambda: self._wants(model))
        except Overloaded as error:
            # As with one that is to be restored it is tried again.
            log.info("%s waits on the host: %s", model.model_id, error)
        except TinsmithError as error:
            log.warning("%s did not come back from the host: %s", model.model_id, error)
            if model.sequence.ready:
                self._fail_next(model, error)
        finally:
            model.held = False
            self._wake()

    def _fail_next(self, model: Model, error: TinsmithError) -> None:
        operation = model.sequence.executed(model.sequence.ready[0].seq_id)
        self._finish(model, operation, OperationResult(error=error_to_pb(error)))
