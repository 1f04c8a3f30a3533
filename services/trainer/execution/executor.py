"""Carries out what the scheduler decides: passes, control operations beside them, results to waiters.

Invariants: an operation gets exactly one result; an operation that fails changes nothing and stops nobody;
a failure that leaves the world's state in doubt ends `run`, and with it the process; an operation that was
under way when the trainer died runs with no other beside it, as far as others can wait for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter

from services.common.contract import ids
from services.common.contract.errors import (
    InvalidRequest,
    ModelNotResident,
    Overloaded,
    StorageAway,
    TinsmithError,
    Unavailable,
    by_code,
)
from services.common.contract.errors import to_pb as error_to_pb
from services.common.process import failpoints
from services.common.process.crashes import CrashLedger
from services.common.process.pools import COMPUTE
from services.common.storage.base import failure
from services.common.telemetry import owner_class, subject
from services.common.telemetry.repeats import Repeats
from services.common.telemetry.subject import Subject
from services.trainer import convert
from services.trainer.compute.data import RowResult
from services.trainer.convert import Forward, Step, Target
from services.trainer.execution import measures, passes
from services.trainer.execution.control_ops import ControlOps
from services.trainer.execution.held_up import HeldUp
from services.trainer.execution.resident_models import Model, Operation, OperationResult, Rejected, new_result
from services.trainer.order.anticipation import Anticipation
from services.trainer.order.scheduler import (
    Cursor,
    Decision,
    Limits,
    NextControlOp,
    NextPass,
    only_suspect,
    plan_next,
)
from services.trainer.order.sequencer import Executed, Running
from services.trainer.world.commands import RunPass
from services.trainer.world.world import World
from tinsmith.internal.v1 import operation_pb2

log = logging.getLogger(__name__)

MAX_QUEUED_BYTES = 2 * 1024**3
_STILL_S = 0.05
"""For so long at most operations begin without the event loop having a turn."""
ALONE_S = 30.0
"""For so long at most nothing else runs while one operation runs alone, or waits to: what saves or loads may
wait for a storage for hours. What kills a trainer mostly does so at once."""
READ_ASIDE_BYTES = 64 * 1024
"""Larger operations take longer to read than the event loop may stand still."""


class Executor:
    """Runs the operations of all models.

    Args:
        models: the trainer's models by id; shared with the parts that restore and report them.
    """

    def __init__(
        self,
        world: World,
        models: dict[str, Model],
        control: ControlOps,
        target: Target,
        limits: Limits,
        crashes: CrashLedger[tuple[str, int]],
    ) -> None:
        self._world = world
        self._models = models
        self._control = control
        self._target = target
        self._limits = limits
        self._crashes = crashes
        self._waited_for: set[tuple[str, int]] = set()
        """Control operations that run, and end before one runs alone."""
        self._cursor = Cursor()
        self._anticipation = Anticipation(limits)
        self._wake = asyncio.Event()
        self._held_up = HeldUp(models, control, self._finish, self._wake.set)
        self._failed = Repeats(log, "operations of a model failed")
        self._stopping = False
        self._queued_bytes = 0
        self._queued_of: Counter[str] = Counter()

    @property
    def queued_bytes(self) -> int:
        """Bytes of the operations that wait or run."""
        return self._queued_bytes

    def queued_by_class(self) -> dict[str, float]:
        """Operations that wait or run, by the class of their owners."""
        return owner_class.by_class(self._queued_of)

    async def read(self, operation: operation_pb2.Operation) -> convert.Work | Rejected:
        """What an operation asks for, or why it cannot be understood. A large one is read beside the loop."""
        if operation.ByteSize() > READ_ASIDE_BYTES:
            return await COMPUTE.run(self._read, operation)
        return self._read(operation)

    def _read(self, operation: operation_pb2.Operation) -> convert.Work | Rejected:
        try:
            return convert.from_pb(operation, self._target)
        except InvalidRequest as error:
            return Rejected(error)

    def submit(
        self, operation: operation_pb2.Operation, work: convert.Work | Rejected, after: int, epoch: int
    ) -> OperationResult | asyncio.Future[OperationResult]:
        """Takes in an operation, or finds what is known of it.

        Args:
            work: what `read` made of it.

        Raises:
            ModelNotResident, StaleEpoch, Overloaded, Unavailable, Conflict: as TrainerService.Execute says.
        """
        if self._stopping:
            raise Unavailable("the trainer is draining")
        model = self._models.get(operation.model_id)
        if model is None:
            if not operation.HasField("create_model") or after != -1:
                raise ModelNotResident(f"model {operation.model_id} is not on this trainer")
            model = Model(operation.model_id)
        model.sequence.fence(epoch)
        accepted_at = operation.origin.accepted_at
        known = model.sequence.find(operation.seq_id, after, accepted_at)
        if isinstance(known, Executed):
            return known.result
        if isinstance(known, Running):
            return known.operation.result
        size = operation.ByteSize()
        # The operation everything else of its model waits for is never kept out.
        is_head = model.sequence.is_next(after) and not model.sequence.ready
        if self._queued_bytes + size > MAX_QUEUED_BYTES and not is_head:
            raise Overloaded(f"{self._queued_bytes} bytes of operations are waiting; try again later")
        queued = self._operation(operation, work, size)
        model.sequence.admit(operation.seq_id, after, queued, accepted_at)
        tokens = None if queued.units is None or queued.forward_only else sum(u.tokens for u in queued.units)
        model.habit.asked(tokens, queued.admitted)
        if tokens is not None and not model.is_full:
            self._anticipation.came(model.habit, tokens, queued.admitted)
        self._count(queued, 1)
        owner = queued.subject.owner
        queued.owner_class = owner_class.class_of(owner, self._queued_of, self._queued_of.total())
        self._models[model.model_id] = model
        self._wake.set()
        return queued.result

    async def run(self) -> None:
        """Executes until `stop`; then returns once what had begun is done.

        Raises:
            ExceptionGroup: the world failed.
        """
        begun: float | None = None
        """Since when operations begin, one after the other."""
        async with asyncio.TaskGroup() as control_ops:
            while not self._stopping:
                self._wake.clear()
                self._held_up.see_to(control_ops)
                decision, cursor, alone = self._decide()
                if begun is not None and isinstance(decision, NextPass):
                    # What has begun asks the world first: models that are stepped come back together.
                    begun = None
                    await asyncio.sleep(0)
                    continue
                if isinstance(decision, NextPass) and not alone and (patience := self._patience(decision)):
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(patience):
                            await self._wake.wait()
                    continue
                self._cursor = cursor
                match decision:
                    case None:
                        begun = None
                        self._anticipation.ends()
                        await self._wake.wait()
                    case NextControlOp(model_id, seq_id):
                        model = self._models[model_id]
                        model.held = True
                        begun = time.monotonic() if begun is None else begun
                        self._waited_for.add((model_id, seq_id))
                        task = control_ops.create_task(self._control_op(model), name=f"{model_id}:{seq_id}")
                        if alone:
                            await asyncio.wait([task], timeout=ALONE_S)
                        elif time.monotonic() - begun > _STILL_S:
                            # A thousand models may have one to begin.
                            begun = None
                            await asyncio.sleep(0)
                    case NextPass():
                        await self._pass(decision)

    def _patience(self, decision: NextPass) -> float:
        """Seconds for which a pass does not begin unless something comes; 0 = it begins now."""
        if not passes.is_shared_training(decision, self._models):
            return 0.0
        tokens = sum(passes.computed_tokens(decision, self._models))
        away = [model.habit for model in self._models.values() if not model.is_full]
        return self._anticipation.patience(tokens, away, time.monotonic())

    def _decide(self) -> tuple[Decision | None, Cursor, bool]:
        """What to do next, what is remembered of it, and whether nothing else may be done meanwhile."""
        queues = {
            model_id: queue
            for model_id, model in self._models.items()
            if model.sequence.ready and (queue := list(model.runnable()))
        }
        unshared = {model_id for model_id, model in self._models.items() if model.is_full}
        suspect = only_suspect(queues)
        if suspect is not None:
            # What runs now ends first.
            if self._waited_for:
                return None, self._cursor, True
            return plan_next(suspect, self._limits, Cursor(), unshared)[0], self._cursor, True
        return *plan_next(queues, self._limits, self._cursor, unshared), False

    def stop(self) -> None:
        """Begins nothing new and refuses new operations."""
        self._stopping = True
        self._held_up.stop()
        self._wake.set()

    def abandon(self, error: TinsmithError) -> None:
        """Tells everyone who still waits that the operation did not run here."""
        for model in list(self._models.values()):
            self.evict(model, error)

    def evict(self, model: Model, error: TinsmithError) -> None:
        """Forgets a model; whoever waits for one of its operations gets the error."""
        if self._models.get(model.model_id) is model:
            del self._models[model.model_id]
        for operation in model.sequence.give_up():
            self._count(operation, -1)
            if not operation.result.done():
                operation.result.set_exception(error)

    def _count(self, operation: Operation, sign: int) -> None:
        owner = operation.subject.owner
        self._queued_bytes += sign * operation.size
        self._queued_of[owner] += sign
        if not self._queued_of[owner]:
            del self._queued_of[owner]

    def _operation(
        self, operation: operation_pb2.Operation, work: convert.Work | Rejected, size: int
    ) -> Operation:
        key = operation.model_id, operation.seq_id
        given_up = self._crashes.verdict(key)
        if given_up is not None:
            work = Rejected(given_up)
        return Operation(
            seq_id=operation.seq_id,
            units=work.units if isinstance(work, Forward) else None,
            forward_only=isinstance(work, Forward) and work.forward_only,
            suspect=self._crashes.is_suspect(key),
            model_id=operation.model_id,
            work=work,
            size=size,
            result=new_result(),
            subject=Subject.of(
                operation.origin.traceparent,
                operation.origin.owner,
                operation.model_id,
                ids.request_id(operation.model_id, operation.seq_id),
            ),
        )

    async def _control_op(self, model: Model) -> None:
        """Runs the operation at the head of a model's queue."""
        operation = model.sequence.ready[0]
        subject.begin(operation.subject)
        keys = [(model.model_id, operation.seq_id)]
        released = False

        def release() -> None:
            nonlocal released
            if not released:
                released = True
                model.sequence.executed(operation.seq_id)
                model.held = False
                self._wake.set()

        self._crashes.begin(keys)
        timer = asyncio.get_running_loop().call_later(ALONE_S, self._takes_long, operation)
        if not operation.tries:
            measures.began(operation)
        if isinstance(operation.work, Step) and len(model.sequence.unfinished) == 1:
            # It will have ended in a moment.
            model.habit.stepped(time.monotonic())
        try:
            result = await self._control.run(model, operation, release)
        except ModelNotResident as error:
            self._crashes.end(keys)
            model.held = False
            self.evict(model, error)
            return
        except StorageAway as error:
            # What was released is out of its model's order.
            put_off = self._held_up.fails_at_once if released else self._held_up.put_off
            given_up = put_off(model, operation, error)
            if given_up is None:
                self._crashes.end(keys)
                model.held = False
                return
            result = OperationResult(error=error_to_pb(given_up))
        except (TinsmithError, OSError) as caught:
            what = f"what operation {operation.seq_id} of {model.model_id} saves"
            reason = failure(caught, what) if isinstance(caught, OSError) else caught
            self._failed.failed(model.model_id, caught)
            result = OperationResult(error=error_to_pb(reason))
        finally:
            timer.cancel()
            self._waited_for.difference_update(keys)
            self._wake.set()
        self._crashes.end(keys)
        release()
        self._held_up.settled(model, operation)
        self._finish(model, operation, result)
        if isinstance(operation.work, Step) and not model.sequence.unfinished:
            model.habit.stepped(time.monotonic())
        if result.HasField("unload_model"):
            self.evict(model, ModelNotResident(f"model {model.model_id} was unloaded"))

    def _takes_long(self, operation: Operation) -> None:
        """Nobody waits any more for a control operation that runs, nor when it is tried again. It stays to
        blame with who runs beside it: one that kills a trainer late would never be given up else."""
        operation.suspect = False
        self._waited_for.discard((operation.model_id, operation.seq_id))
        self._wake.set()

    def _finish(self, model: Model, operation: Operation, result: OperationResult) -> None:
        if operation.seq_id in model.sequence.unfinished:
            self._count(operation, -1)
        model.sequence.finish(operation.seq_id, result)
        self._crashes.survived((model.model_id, operation.seq_id))
        model.unsaved_bytes += operation.size
        measures.ended(operation, result)
        model.last_used = time.monotonic()
        self._wake.set()
        if not operation.result.done():
            operation.result.set_result(result)

    async def _pass(self, decision: NextPass) -> None:
        plan, operations = passes.plan(decision, self._models)
        computed = passes.computed_tokens(decision, self._models)
        shared = passes.is_shared_training(decision, self._models)
        for operation in passes.hand_out(decision, self._models):
            measures.began(operation)
        keys = [(operation.model_id, operation.seq_id) for operation in operations]
        self._crashes.begin(keys)
        self._anticipation.begins()
        began = time.monotonic()
        try:
            rows: list[RowResult] = await self._world.call(RunPass(plan))
        except TinsmithError as error:
            # The engine reports failed operations row by row; an error of the whole pass leaves the
            # gradients in doubt.
            raise RuntimeError(f"a pass failed: {error}") from error
        measures.passed(operations, plan, computed, began)
        if shared:
            self._anticipation.passed(sum(computed), time.monotonic() - began)
        self._anticipation.ended(time.monotonic())
        await failpoints.reach("trainer.before_pass_reply")
        self._crashes.end(keys)
        for row in rows:
            operation = operations[row.op]
            operation.rows[row.index] = row
            if row.failure is not None:
                operation.failed = by_code(row.failure.code, row.failure.category, row.failure.message)
                operation.next_unit = len(operation.units or ())
        for model_id in dict.fromkeys(operation.model_id for operation in operations):
            if model_id in self._models:
                self._finish_complete(self._models[model_id])

    def _finish_complete(self, model: Model) -> None:
        ready = model.sequence.ready
        while ready and ready[0].is_complete:
            operation = model.sequence.executed(ready[0].seq_id)
            self._finish(model, operation, passes.forward_result(operation))
