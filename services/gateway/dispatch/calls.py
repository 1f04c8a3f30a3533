"""The Execute calls of one model that are under way.

Invariants: an operation has at most one call; one that failed is made again for as long as its judge says so.
When all are ended, what is already known of an operation is still written down. What a call took of the room
for such is given back once, when it has ended, however it does. What depends on batches (a step, a save) is
answered only when all batches before it are: so what was answered of it is what a replay comes to again. In
a replay it is sent only when all before it were repeated, and of a batch nothing is told unless what changed
the weights before it was: a model without one of its operations is another one, and must not become durable.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import grpc.aio
from prometheus_client import Counter

from services.common.contract import ids
from services.common.contract.errors import DeadlineExceeded, TinsmithError
from services.common.process.carrier.asking import Link
from services.common.process.tasks import cancel_all
from services.common.telemetry import subject, tracing
from services.common.telemetry.subject import Subject
from services.gateway.cluster.discovery import call_error
from services.gateway.dispatch import plan
from services.gateway.dispatch.plan import Send
from services.gateway.dispatch.send_room import SendRoom
from tinsmith.internal.v1 import operation_pb2, trainer_pb2
from tinsmith.v1 import results_pb2

_EXECUTE = "/tinsmith.internal.v1.TrainerService/Execute"
REPLAYED = Counter(
    "tinsmith_replayed_operations_total", "Operations sent to a trainer again, whose results were known"
)

OnAnswer = Callable[[Send, operation_pb2.Operation, results_pb2.OperationResult], Awaitable[bool]]
OnError = Callable[[Send, operation_pb2.Operation, TinsmithError], Awaitable["Outcome"]]


class Results(Protocol):
    """Is told of which operations the results are to come."""

    def expect(self, seq_id: int) -> None: ...

    def expect_no_longer(self, seq_id: int) -> None: ...


class Outcome(Enum):
    """What a failed call comes to."""

    AGAIN = "again"
    """The same call is made again."""
    SETTLED = "settled"
    """The operation took effect, and all is said about it."""
    OPEN = "open"
    """What depends on the operation has to wait for another call."""


@dataclass(frozen=True)
class _Needed:
    """A call that later ones may depend on: of a batch, or of an operation that is repeated."""

    call: asyncio.Task[bool]
    batch: bool
    repeated: bool


class Calls:
    """Makes calls, and tells what came of each.

    Args:
        timeout: deadline of one call, in seconds.
        on_answer: takes the result of an operation; whether the operation is settled by it.
        on_error: takes the failure of a call.
        ended: called whenever a call is over.
        room: has what a call takes already when it starts.
        results: hears of the operations under way whose results are not known.

    Attributes:
        failure: what `on_answer` or `on_error` raised, if they did.
    """

    def __init__(
        self,
        timeout: float,
        on_answer: OnAnswer,
        on_error: OnError,
        ended: Callable[[], None],
        room: SendRoom,
        results: Results,
    ) -> None:
        self._room = room
        self._results = results
        self._timeout = timeout
        self._on_answer = on_answer
        self._on_error = on_error
        self._ended = ended
        self._calls: dict[int, tuple[asyncio.Task[bool], int]] = {}
        self._needed: dict[int, _Needed] = {}
        """seq_id -> call that later ones depend on; one not settled stays until `end`."""
        self.failure: BaseException | None = None

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def bytes(self) -> int:
        """Payload of the operations that are under way."""
        return sum(size for _, size in self._calls.values())

    def start(
        self,
        trainer_id: str,
        link: Link,
        send: Send,
        operation: operation_pb2.Operation,
        epoch: int,
    ) -> None:
        """Sends an operation to a trainer, under a fencing epoch."""
        request = trainer_pb2.ExecuteRequest(operation=operation, epoch=epoch, after_seq_id=send.after_seq_id)
        name = f"execute {operation.model_id}:{send.seq_id}"
        call = asyncio.create_task(self._call(link, send, request), name=name)
        self._calls[send.seq_id] = (call, send.size)
        REPLAYED.inc(send.replayed)
        if not send.replayed:
            self._results.expect(send.seq_id)
        batch = _is_batch(operation)
        if batch or send.replayed:
            self._needed[send.seq_id] = _Needed(call, batch, send.replayed)
        call.add_done_callback(lambda done: self._over(trainer_id, send, done))

    async def end_after(self, seq_id: int) -> None:
        """Ends the calls of all operations after one that has not run: nothing is known of them."""
        calls = [self._calls.pop(number)[0] for number in list(self._calls) if number > seq_id]
        self._needed = {number: call for number, call in self._needed.items() if number <= seq_id}
        await cancel_all(calls)

    async def end(self, known: Collection[int]) -> None:
        """Ends all calls, those of the known operations when their results are written down."""
        calls = {seq_id: call for seq_id, (call, _) in self._calls.items()}
        self._calls.clear()
        self._needed.clear()
        writing = [call for seq_id, call in calls.items() if seq_id in known]
        try:
            if writing:
                await asyncio.wait(writing)
        finally:
            await cancel_all(calls.values())

    def _over(self, trainer_id: str, send: Send, call: asyncio.Task[bool]) -> None:
        self._room.give(trainer_id, send.size)
        current = self._calls.get(send.seq_id)
        if current is not None and current[0] is call:
            del self._calls[send.seq_id]
            if _settled(call):
                self._needed.pop(send.seq_id, None)
        if not send.replayed:
            self._results.expect_no_longer(send.seq_id)
        if not call.cancelled() and call.exception() is not None:
            self.failure = call.exception()
        self._ended()

    async def _call(self, link: Link, send: Send, request: trainer_pb2.ExecuteRequest) -> bool:
        """Whether the operation is settled."""
        operation = request.operation
        request_id = ids.request_id(operation.model_id, operation.seq_id)
        origin = operation.origin
        subject.begin(Subject.of(origin.traceparent, origin.owner, operation.model_id, request_id))
        origin.handed_at = time.time()
        batch = _is_batch(request.operation)
        if not (batch or await self._before(send.seq_id, lambda call: call.repeated)):
            return False
        attempt = 0
        while True:
            try:
                with tracing.span("execute", "CLIENT", replayed=send.replayed):
                    reply = await link.ask(_EXECUTE, request, trainer_pb2.ExecuteResponse, self._timeout)
            except (TinsmithError, TimeoutError, grpc.aio.AioRpcError) as raised:
                outcome = await self._on_error(send, request.operation, _typed(raised))
                if outcome is not Outcome.AGAIN:
                    return outcome is Outcome.SETTLED
                attempt += 1
                await asyncio.sleep(plan.backoff(attempt))
                continue
            if not await self._before(send.seq_id, lambda call: not (batch and call.batch)):
                return False
            return await self._on_answer(send, request.operation, reply.result)

    async def _before(self, seq_id: int, depends: Callable[[_Needed], bool]) -> bool:
        """Waits for the calls before an operation that it depends on; whether all are settled."""
        found = [each.call for number, each in self._needed.items() if number < seq_id and depends(each)]
        if found:
            await asyncio.wait(found)
        return all(_settled(call) for call in found)


def _typed(error: TinsmithError | TimeoutError | grpc.aio.AioRpcError) -> TinsmithError:
    """What a call failed with."""
    if isinstance(error, grpc.aio.AioRpcError):
        return call_error(error)
    return DeadlineExceeded(str(error)) if isinstance(error, TimeoutError) else error


def _is_batch(operation: operation_pb2.Operation) -> bool:
    return operation.WhichOneof("kind") == "forward_backward"


def _settled(call: asyncio.Task[bool]) -> bool:
    return not call.cancelled() and call.exception() is None and call.result()
