"""The Execute calls of one model that are under way.

Invariants: an operation has at most one call; one that failed is made again for as long as its judge says so.
When all are ended, what is already known of an operation is still written down. What a call took of the room
for such is given back once, when it has ended, however it does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection

import grpc.aio

from services.common.contract.errors import TinsmithError
from services.common.process.tasks import cancel_all
from services.gateway.cluster.discovery import call_error
from services.gateway.dispatch import plan
from services.gateway.dispatch.plan import Send
from services.gateway.dispatch.send_room import SendRoom
from tinsmith.internal.v1 import operation_pb2, trainer_pb2, trainer_pb2_grpc
from tinsmith.v1 import results_pb2

OnAnswer = Callable[[Send, operation_pb2.Operation, results_pb2.OperationResult], Awaitable[None]]
OnError = Callable[[Send, operation_pb2.Operation, TinsmithError], Awaitable[bool]]


class Calls:
    """Makes calls, and tells what came of each.

    Args:
        timeout: deadline of one call, in seconds.
        on_answer: takes the result of an operation.
        on_error: takes the failure of a call; whether the call is to be made again.
        ended: called whenever a call is over.
        room: has what a call takes already when it starts.

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
    ) -> None:
        self._room = room
        self._timeout = timeout
        self._on_answer = on_answer
        self._on_error = on_error
        self._ended = ended
        self._calls: dict[int, tuple[asyncio.Task[None], int]] = {}
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
        stub: trainer_pb2_grpc.TrainerServiceStub,
        send: Send,
        operation: operation_pb2.Operation,
        epoch: int,
    ) -> None:
        """Sends an operation to a trainer, under a fencing epoch."""
        request = trainer_pb2.ExecuteRequest(operation=operation, epoch=epoch, after_seq_id=send.after_seq_id)
        name = f"execute {operation.model_id}:{send.seq_id}"
        call = asyncio.create_task(self._call(stub, send, request), name=name)
        self._calls[send.seq_id] = (call, send.size)
        call.add_done_callback(lambda done: self._over(trainer_id, send, done))

    async def end(self, known: Collection[int]) -> None:
        """Ends all calls, those of the known operations when their results are written down."""
        calls = {seq_id: call for seq_id, (call, _) in self._calls.items()}
        self._calls.clear()
        writing = [call for seq_id, call in calls.items() if seq_id in known]
        try:
            if writing:
                await asyncio.wait(writing)
        finally:
            await cancel_all(calls.values())

    def _over(self, trainer_id: str, send: Send, call: asyncio.Task[None]) -> None:
        self._room.give(trainer_id, send.size)
        current = self._calls.get(send.seq_id)
        if current is not None and current[0] is call:
            del self._calls[send.seq_id]
        if not call.cancelled() and call.exception() is not None:
            self.failure = call.exception()
        self._ended()

    async def _call(
        self, stub: trainer_pb2_grpc.TrainerServiceStub, send: Send, request: trainer_pb2.ExecuteRequest
    ) -> None:
        attempt = 0
        while True:
            try:
                reply = await stub.Execute(request, timeout=self._timeout)
            except grpc.aio.AioRpcError as raw:
                if not await self._on_error(send, request.operation, call_error(raw)):
                    return
                attempt += 1
                await asyncio.sleep(plan.backoff(attempt))
                continue
            await self._on_answer(send, request.operation, reply.result)
            return
