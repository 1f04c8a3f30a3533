"""Models whose next operation cannot run at present: they could not be created, are on the host, or the
storage that it loads from or saves to is away.

Invariant: such an operation has its result, its model is on its way back, or it is tried again after a pause;
none of another model waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from prometheus_client import Counter

from services.common.contract.errors import Overloaded, StorageAway, TinsmithError, by_code
from services.common.contract.errors import to_pb as error_to_pb
from services.common.telemetry.repeats import Repeats
from services.trainer.convert import Export, Publish, Save
from services.trainer.execution.control_ops import ControlOps
from services.trainer.execution.resident_models import Model, Operation, OperationResult, new_result

log = logging.getLogger(__name__)

READS = Counter(
    "tinsmith_checkpoint_reads_failed_total", "Checkpoints that could not be read, as their storage was away"
)
WRITES = Counter(
    "tinsmith_checkpoint_writes_failed_total",
    "Checkpoints, exports and snapshots that could not be written, as their storage was away",
)

AWAY_S = 600.0
"""For so long an operation is tried again whose checkpoint can be neither read nor written."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


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
        self._away = Repeats(log, "a checkpoint is waited for")

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

    def put_off(self, model: Model, operation: Operation, error: StorageAway) -> StorageAway | None:
        """Has an operation whose checkpoint can be neither read nor written tried again after a pause, and
        tells those who wait for it why. After AWAY_S it is given up: returns what it comes to then."""
        self._count(model, operation, error)
        now = time.monotonic()
        operation.away_since = operation.away_since or now
        if now - operation.away_since >= AWAY_S:
            given_up = StorageAway(
                f"{error.message}; it could not for {AWAY_S / 60:.0f} minutes: send the request again when "
                "the storage is back"
            )
            if not model.created:
                model.broken = given_up
            return given_up
        pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(operation.tries, 16))
        operation.tries += 1
        model.rests = True
        asyncio.get_running_loop().call_later(pause, self._try_again, model)
        told, operation.result = operation.result, new_result()
        if not told.done():
            told.set_exception(error)
        return None

    def fails_at_once(self, model: Model, operation: Operation, error: StorageAway) -> StorageAway:
        """What an operation comes to that cannot be put off."""
        self._count(model, operation, error)
        return StorageAway(f"{error.message}; send the request again when the storage is back")

    def settled(self, model: Model, operation: Operation) -> None:
        """An operation has its result, whether it was put off before or not."""
        if operation.tries:
            self._away.over(model.model_id)

    def _count(self, model: Model, operation: Operation, error: StorageAway) -> None:
        (WRITES if isinstance(operation.work, Save | Export | Publish) else READS).inc()
        self._away.failed(model.model_id, error)

    def _try_again(self, model: Model) -> None:
        model.rests = False
        self._wake()

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
