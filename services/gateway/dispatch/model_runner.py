"""Sends one model's journaled operations to its trainer, for as long as this gateway leads the model.

Invariants: all writes carry the lease's epoch, and no two trainers ever get the same; an operation's
records are written before its future is resolved; whatever goes wrong in between, the operation stays
pending in the journal and is sent again, by this runner or the next holder of the lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack

import grpc.aio

from services.common.contract import errors
from services.common.contract.errors import Internal, StorageAway, TinsmithError
from services.common.state.journal import Journal, UnreadableOperation
from services.common.state.journal_records import Entry, JournalIndex, error_result
from services.common.state.registry import ServiceRecord
from services.common.telemetry.repeats import Repeats
from services.gateway.cluster.base_models import retired
from services.gateway.cluster.discovery import Services, call_error
from services.gateway.dispatch import plan
from services.gateway.dispatch.calls import Calls, Outcome
from services.gateway.dispatch.gaps import GapWatch
from services.gateway.dispatch.leases import Lease
from services.gateway.dispatch.placement import Loads, Placement
from services.gateway.dispatch.plan import Action, DispatchSettings, Plan, Position, Send
from services.gateway.dispatch.publish_results import ResultPublisher
from services.gateway.dispatch.recovery import Recovery
from services.gateway.dispatch.send_room import SendRoom
from tinsmith.internal.v1 import operation_pb2, trainer_pb2, trainer_pb2_grpc
from tinsmith.v1 import results_pb2

log = logging.getLogger(__name__)

_IDLE_CHECK_S = 3.0
_NO_SNAPSHOT = (errors.NotFound, errors.SnapshotNotFound)
_RECHECK_S = 30.0


class ModelRunner:
    """One model under one lease. `run` returns when the model is idle or the lease is gone.

    Args:
        room, not_back: of all models; for what is under way, and to tell which are not here.
    """

    def __init__(
        self,
        lease: Lease,
        fence: Callable[[Lease], Awaitable[None]],
        journal: Journal,
        trainers: Services,
        loads: Loads,
        publisher: ResultPublisher,
        session_finished: Callable[[str], Awaitable[bool]],
        settings: DispatchSettings,
        room: SendRoom,
        not_back: Repeats,
    ) -> None:
        self.model_id = lease.model_id
        self._lease = lease
        self._fence = fence
        self._journal = journal
        self._trainers = trainers
        self._placement = Placement(lease, fence, journal, trainers, loads, settings.trainer_patience)
        self._publisher = publisher
        self._session_finished = session_finished
        self._settings = settings
        self._changed = asyncio.Event()
        self._changed.set()
        lease.on_lost = wake = self._changed.set
        self._base_model = self._paused = ""
        self._incarnation: str | None = None
        self._synchronised = self._discards = self._looking = False
        self._position = Position()
        self._room, self._not_back, self._awaited = room, not_back, ""
        asked = self._answered, self._call_failed
        self._calls = Calls(settings.execute_timeout, *asked, wake, room, publisher)
        self._failed_calls: Counter[tuple[int, str]] = Counter()
        self._attempt, self._not_before = 0, 0.0
        self._put_off = -1
        """The operation that the trainer tries again after pauses; nothing after it is sent meanwhile."""
        self._gap = GapWatch(lease, journal, session_finished, self._pause, settings)
        self._recovery = Recovery(lease, journal, publisher, session_finished)
        self._idle_since: float | None = None

    def wake(self) -> None:
        """There may be something new to do."""
        self._changed.set()

    def offer(self, operation: operation_pb2.Operation) -> bool:
        """Sends an operation that was journaled just now if it is the next and nothing stands in its way;
        whether it did. Else the journal says what to do, and `wake` is to be called.

        Between two looks at the journal the position says all that is to be known: everything up to the
        cursor is sent, so what follows it directly is what a look would find.
        """
        trainer = self._placement.ready(self._incarnation)
        ready = trainer is not None and self._synchronised
        in_doubt = self._lease.lost or self._looking or self._changed.is_set() or bool(self._paused)
        if trainer is None or not ready or in_doubt or operation.seq_id != self._position.cursor + 1:
            return False
        entry = Entry(operation.seq_id, operation.ByteSize(), pending=True)
        step = self._plan([entry], trainer, floor=-1)
        if not step.sends:
            return False
        self._idle_since = None
        self._room.take(trainer.id, step.nbytes)
        self._take(step, [operation], trainer)
        return True

    @property
    def woken(self) -> bool:
        """Whether `wake` was called since the runner last looked."""
        return self._changed.is_set()

    async def run(self) -> None:
        """Dispatches until there is nothing to do for a while, or the lease is lost.

        Raises:
            Exception: an operation's handling failed unexpectedly; it is still in the journal.
        """
        awaited = ""
        try:
            while not self._lease.lost:
                self._changed.clear()
                self._looking, awaited, self._awaited = True, self._awaited, ""
                delay = await self._advance()
                self._looking = False
                if awaited != self._awaited:
                    self._room.leave(awaited, self.model_id)
                if self._calls.failure is not None:
                    raise self._calls.failure
                if delay is None:
                    return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(delay):
                        await self._changed.wait()
        finally:
            for trainer_id in {awaited, self._awaited}:
                self._room.leave(trainer_id, self.model_id)
            await self._cancel_calls()

    async def _advance(self) -> float | None:
        """Does all that can be done now; seconds until it is worth looking again, or None to stop."""
        quiet, begun = not self._calls, self._position
        index = await self._journal.index(self.model_id, self._position.cursor)
        if not index.pending and quiet:
            return await self._idle()
        self._idle_since = None
        if index.closed:
            await self._fail_pending(index.closed)
            return 0.0
        self._base_model = index.base_model
        trainer = self._placement.choose(index)
        if trainer is None and self._trainers.retired(index.base_model):
            await self._fail_pending(error_result(errors.to_pb(retired(index.base_model))))
            return 0.0
        if trainer is None:
            await self._pause(plan.missing_reason(self._base_model))
            return self._settings.trainer_poll
        restarted = trainer.incarnation != self._incarnation
        wait = self._not_before - asyncio.get_running_loop().time()
        if wait > 0 and not restarted:
            return wait
        if restarted or not self._synchronised:
            self._room.leave(trainer.id, self.model_id)  # Others need not wait until it is back.
            await self._cancel_calls()
            if restarted and self._incarnation is not None:
                # The last one may live on, cut off, and must not move the pointer under the replay.
                await self._fence(self._lease)
            await self._placement.settle(index, trainer)
            self._incarnation = trainer.incarnation
            self._synchronised = not self._lease.lost and await self._synchronise(trainer)
            return 0.0
        if self._position is not begun or self._put_off >= 0:
            # Put off since the index was read, which says what follows all that was sent then; or still.
            return 0.0 if self._put_off < 0 else _RECHECK_S
        return await self._send(index, trainer, quiet)

    async def _idle(self) -> float | None:
        await self._resume()
        now = asyncio.get_running_loop().time()
        if self._idle_since is None:
            self._idle_since = now
        left = self._idle_since + self._settings.idle_release - now
        if left <= 0:
            return None
        if now - self._idle_since >= _IDLE_CHECK_S and await self._session_finished(self.model_id):
            # Nothing more will come; whoever takes the model down needs the lease.
            return None
        return min(left, _IDLE_CHECK_S)

    async def _synchronise(self, trainer: ServiceRecord) -> bool:
        """Finds out where the trainer is with this model, after bringing it back if need be."""
        if self._discards:
            await self._fence(self._lease)
        index = await self._journal.index(self.model_id, -1)
        since = self._lease.epoch if self._discards else index.moved
        if plan.starts_at_creation(index) and not since:
            self._position = Position()
            return True
        stub = trainer_pb2_grpc.TrainerServiceStub(self._trainers.channel(trainer))
        request = trainer_pb2.RestoreRequest(
            model_id=self.model_id, epoch=self._lease.epoch, moved_epoch=since
        )
        try:
            reply = await stub.Restore(request, timeout=self._settings.restore_timeout)
            applied = int(reply.seq_id)
        except grpc.aio.AioRpcError as raw:
            error = call_error(raw)
            if isinstance(error, _NO_SNAPSHOT) and plan.can_replay_from_start(index):
                applied = -1
            else:
                await self._after_failed_restore(error)
                return False
        self._discards = False
        self._not_back.over(self.model_id)
        self._position = plan.position_after_restore(applied, index.lowest_pending)
        log.info("model %s is at %d on %s", self.model_id, applied, trainer.id)
        return True

    async def _after_failed_restore(self, error: TinsmithError) -> None:
        action = plan.after_failure(error, 1)
        if action is Action.GIVE_UP_LEASE:
            self._lease.lose()
            return
        wait = self._delay(plan.most_between_restores(error))
        if await self._recovery.ends_with_restore(error, wait):
            return
        self._not_back.failed(self.model_id, error)
        await self._pause(plan.not_back_reason(error, plan.missing_reason(self._base_model)), wait)

    async def _send(self, index: JournalIndex, trainer: ServiceRecord, quiet: bool) -> float:
        begun, step = self._position, self._plan(index.entries, trainer, max(index.floor, index.durable))
        if step.held_back:
            self._awaited = trainer.id
            self._room.await_turn(trainer.id, self.model_id, self._changed.set)
        with ExitStack() as taken:
            # Before the payloads are read, which is when they take memory.
            self._room.take(trainer.id, step.nbytes)
            taken.callback(self._room.give, trainer.id, step.nbytes)
            try:
                wanted = [send.seq_id for send in step.sends]
                operations = await self._journal.operations(self.model_id, wanted)
            except UnreadableOperation as error:
                replayed = error.seq_id in {send.seq_id for send in step.sends if send.replayed}
                fail = self._replay_failed if replayed else self._publisher.fail_unreadable
                await fail(error.seq_id, error)
                return 0.0
            if self._position is not begun or any(operation is None for operation in operations):
                # One was put off, or a durable snapshot came to cover one of them just now: look again.
                return 0.0
            taken.pop_all()
        moved = step.position != self._position
        self._take(step, [operation for operation in operations if operation is not None], trainer)
        if step.sends:
            await self._resume()
        if step.gap is None:
            self._gap.closed()
        if self._calls or step.held_back:
            return _RECHECK_S
        if moved or not quiet:
            # A call that ended since the index was read may have changed what it says.
            return 0.0
        if step.gap is not None:
            return await self._gap.wait_for(step.gap)
        # Everything is sent and answered, and still something is pending: find out where things are.
        self._synchronised = False
        self._delay()
        return 0.0

    def _plan(self, entries: Sequence[Entry], trainer: ServiceRecord, floor: int) -> Plan:
        calls, window = self._calls, self._settings.window
        allowance = self._room.allowance(trainer.id, self.model_id)
        return plan.plan(self._position, entries, floor, len(calls), calls.bytes, window, allowance)

    def _take(
        self, step: Plan, operations: Sequence[operation_pb2.Operation], trainer: ServiceRecord
    ) -> None:
        """Sends what was planned: one operation per send."""
        link = self._trainers.link(trainer)
        for send, operation in zip(step.sends, operations, strict=True):
            self._calls.start(trainer.id, link, send, operation, self._lease.epoch)
        self._position = step.position

    async def _answered(
        self, send: Send, operation: operation_pb2.Operation, result: results_pb2.OperationResult
    ) -> bool:
        self._attempt = 0
        await self._put_off_no_longer(send)
        if result.WhichOneof("kind") is None:
            raise Internal(f"the trainer answered {self.model_id}:{send.seq_id} with nothing")
        if not send.replayed:
            await self._publisher.publish(operation, result)
        elif result.HasField("error") and result.error.code not in plan.TOOK_EFFECT:
            await self._replay_failed(send.seq_id, errors.from_pb(result.error))
            return False
        return not self._lease.lost

    async def _call_failed(
        self, send: Send, operation: operation_pb2.Operation, error: TinsmithError
    ) -> Outcome:
        action = self._judge(send, error)
        if action is Action.RESEND:
            if isinstance(error, StorageAway):
                await self._stay_at(send.seq_id, error.message)
            return Outcome.AGAIN
        await self._put_off_no_longer(send)
        await self._act(action, send, operation, error)
        return Outcome.SETTLED if action is Action.REPORT_LOST_RESULT else Outcome.OPEN

    async def _stay_at(self, seq_id: int, why: str) -> None:
        """The trainer puts an operation off. What was sent after it would take room from other models."""
        if self._put_off != seq_id:
            position = plan.position_at(self._position, seq_id)
            self._put_off, self._paused, self._position = seq_id, why, position
            await self._calls.end_after(seq_id)
        await self._pause(why, plan.BETWEEN_TRIES_S)

    def _judge(self, send: Send, error: TinsmithError) -> Action:
        call = send.seq_id, error.code
        if isinstance(error, errors.Conflict):
            self._failed_calls[call] += 1
        return plan.after_failure(error, max(1, self._failed_calls[call]))

    async def _act(
        self, action: Action, send: Send, operation: operation_pb2.Operation, error: TinsmithError
    ) -> None:
        if action is Action.GIVE_UP_LEASE:
            log.info("giving up %s: %s", self.model_id, error.message)
            self._lease.lose()
            return
        failed = results_pb2.OperationResult(error=errors.to_pb(error))
        if action is Action.REPORT_LOST_RESULT:
            if not send.replayed:
                await self._publisher.publish(operation, failed)
            return
        # The runner ends all calls when it synchronises, this one too: that is asked for last.
        if action is Action.AWAIT_TRAINER:
            self._delay()
            await self._pause(plan.missing_reason(self._base_model))
        elif action is Action.FAIL and send.replayed:
            await self._replay_failed(send.seq_id, error)
        elif action is Action.FAIL:
            log.error("operation %d of %s failed: %s", send.seq_id, self.model_id, error.message)
            await self._publisher.publish(operation, failed)
        # A creation needs no model: the trainer has one of a creation that the journal lost.
        self._discards |= send.seq_id == 0 and isinstance(error, errors.ModelNotResident)
        self._synchronised = False

    async def _replay_failed(self, seq_id: int, error: TinsmithError) -> None:
        """An operation that had taken effect cannot be repeated: without it the model is another one."""
        wait = self._recovery.pause(seq_id)
        self._not_before = asyncio.get_running_loop().time() + wait
        self._discards = True  # The trainer would answer as it did, and its copy lacks the operation.
        if not await self._recovery.ends_with_operation(seq_id, error, wait):
            why = plan.cannot_repeat(seq_id, error)
            log.error("model %s waits: %s; next try in %.1f s", self.model_id, why, wait)
            await self._pause(why, wait)
        self._synchronised = False

    async def _fail_pending(self, closing: bytes) -> None:
        """Nothing of the model will run: everything that still waits fails with the reason."""
        await self._cancel_calls()
        last = await self._publisher.fail_pending(closing)
        self._position = Position(cursor=max(self._position.cursor, last))

    def _delay(self, most: float = 2.0) -> float:
        self._attempt += 1
        wait = plan.backoff(self._attempt, first=0.1, most=most)
        self._not_before = asyncio.get_running_loop().time() + wait
        return wait

    async def _pause(self, reason: str, seconds: float = 0.0) -> None:
        self._paused = reason
        await self._journal.set_queue_state(self.model_id, reason, seconds)

    async def _resume(self) -> None:
        if self._paused and self._put_off < 0:
            self._paused = ""
            await self._journal.set_queue_state(self.model_id, "")

    async def _put_off_no_longer(self, send: Send) -> None:
        if send.seq_id == self._put_off:
            self._put_off = -1
            await self._resume()

    async def _cancel_calls(self) -> None:
        """Ends all calls. What is already known of an operation is still written down."""
        self._put_off = -1
        await self._calls.end(() if self._lease.lost else self._publisher.writing)
