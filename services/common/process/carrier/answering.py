"""The side that answers carried calls.

Invariants: a call is answered by the handler of its method, in a task of its own, and its end is told once.
It is cancelled when its caller leaves it or the stream ends. A handler that answers several times makes the
next answer when the one before was sent, so that one waits at most; what goes together is bounded.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import Any, NamedTuple, cast

import grpc
import grpc.aio

from services.common.contract import errors
from services.common.contract.errors import InvalidRequest, Overloaded, TinsmithError, TooLarge, Unavailable
from services.common.process import rpc
from services.common.process.serving.server_limits import MAX_MESSAGE_BYTES
from services.common.process.tasks import cancel_all
from tinsmith.internal.v1 import carrier_pb2, carrier_pb2_grpc
from tinsmith.internal.v1.carrier_pb2 import CarriedCall, CarryRequest, CarryResponse

TOGETHER_BYTES = 2**20
_MOST_BYTES = MAX_MESSAGE_BYTES - 2**10
_MOST_CALLS = 65_536

_NAME: str = carrier_pb2.DESCRIPTOR.services_by_name["CarrierService"].full_name


class Carrier(carrier_pb2_grpc.CarrierServiceServicer):
    """Answers calls of one servicer's methods that come over streams.

    Args:
        add: generated add_..._to_server function.
        tells: whether each call is a line of the access log.
    """

    def __init__(
        self, add: Callable[[Any, grpc.aio.Server], None], servicer: Any, tells: bool = False
    ) -> None:
        found = _Methods()
        add(servicer, cast(grpc.aio.Server, found))
        self._handlers = found.handlers
        self._tells = tells
        self._lines: set[_Line] = set()
        self._closed = False

    @property
    def service(self) -> rpc.Service:
        """What `rpc.serve` takes."""
        return carrier_pb2_grpc.add_CarrierServiceServicer_to_server, self, _NAME

    def close(self) -> None:
        """Takes no more calls; each stream ends when those that it carries are answered."""
        self._closed = True
        for line in self._lines:
            line.close()

    async def Carry(
        self, requests: AsyncIterator[CarryRequest], context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[CarryResponse]:
        line = _Line(self._handlers, context, self._tells)
        # Also when the stream ends while an answer is being sent.
        context.add_done_callback(lambda _: line.cancel())
        self._lines.add(line)
        if self._closed:
            line.close()
        reading = asyncio.create_task(line.read(requests), name="carried calls")
        try:
            async for answers in line.answers():
                yield answers
        finally:
            self._lines.discard(line)
            await cancel_all([reading, *line.cancel()])


class _Methods:
    """Takes the place of a server that handlers are added to."""

    def __init__(self) -> None:
        self.handlers: dict[str, grpc.RpcMethodHandler] = {}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """The same handlers, by service."""

    def add_registered_method_handlers(
        self, service: str, handlers: dict[str, grpc.RpcMethodHandler]
    ) -> None:
        self.handlers |= {f"/{service}/{method}": handler for method, handler in handlers.items()}


class _Due(NamedTuple):
    """An answer that is to be sent: the number of its call and what CarriedAnswer has besides. What is made
    of it is made in the message that carries it: large ones are copied once less."""

    fields: Mapping[str, Any]
    size: int
    sent: asyncio.Future[None] | None


class _Line:
    """One stream: the calls that it carries, and the answers that are due."""

    def __init__(
        self, handlers: dict[str, grpc.RpcMethodHandler], context: grpc.aio.ServicerContext, tells: bool
    ) -> None:
        self._handlers = handlers
        self._context = context
        self._tells = tells
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._due: deque[_Due] = deque()
        self._changed = asyncio.Event()
        self._closed = False

    def close(self) -> None:
        """Takes no more calls."""
        self._closed = True
        self._changed.set()

    def cancel(self) -> list[asyncio.Task[None]]:
        """Cancels what is carried; returns that."""
        running = list(self._calls.values())
        for task in running:
            task.cancel()
        return running

    async def read(self, requests: AsyncIterator[CarryRequest]) -> None:
        """Begins the calls that come, until no more do."""
        async for request in requests:
            for number in request.left:
                if (task := self._calls.get(number)) is not None:
                    task.cancel()
            for call in request.calls:
                self._begin(call)
        self.close()

    async def answers(self) -> AsyncIterator[CarryResponse]:
        """What is due, until no more calls come and all are answered."""
        while True:
            while self._due:
                together, sent = self._together()
                yield together
                for future in sent:
                    if not future.done():
                        future.set_result(None)
            if self._closed and not self._calls:
                return
            self._changed.clear()
            await self._changed.wait()

    def _together(self) -> tuple[CarryResponse, list[asyncio.Future[None]]]:
        together = CarryResponse()
        sent: list[asyncio.Future[None]] = []
        size = 0
        while self._due and (not together.answers or size + self._due[0].size <= TOGETHER_BYTES):
            due = self._due.popleft()
            together.answers.add(**due.fields)
            size += due.size
            if due.sent is not None:
                sent.append(due.sent)
        return together, sent

    def _begin(self, call: CarriedCall) -> None:
        if self._closed:
            self._fail(call.number, Unavailable("this service ends; ask another one"))
        elif len(self._calls) >= _MOST_CALLS:
            self._fail(call.number, Overloaded(f"{len(self._calls)} calls are under way on this stream"))
        else:
            task = asyncio.create_task(self._answer(call), name=call.method)
            self._calls[call.number] = task
            task.add_done_callback(lambda _: self._ended(call.number, task))

    def _ended(self, number: int, task: asyncio.Task[None]) -> None:
        del self._calls[number]
        if task.cancelled():
            # Whoever left it does not hear of it.
            self._fail(number, Unavailable("the call broke off"))
        self._changed.set()

    async def _answer(self, call: CarriedCall) -> None:
        error: TinsmithError | None = None
        try:
            with rpc.measured(
                call.method, call.traceparent, self._tells, lambda: error.grpc_status if error else "OK"
            ):
                try:
                    await self._handle(call)
                except Exception as raised:
                    error = rpc.typed(raised, call.method)
                    raise error from raised
        except TinsmithError as failed:
            self._fail(call.number, failed)

    async def _handle(self, call: CarriedCall) -> None:
        handler = self._handlers.get(call.method)
        if handler is None:
            raise InvalidRequest(f"{call.method[:100]} is no method that is carried here")
        number, request = call.number, handler.request_deserializer(call.request)
        if handler.unary_unary is not None:
            last = self._bytes(handler, await handler.unary_unary(request, self._context), request)
            self._put(len(last), number=number, last=last)
            return
        loop = asyncio.get_running_loop()
        async with aclosing(handler.unary_stream(request, self._context)) as replies:
            async for reply in replies:
                more, sent = self._bytes(handler, reply), loop.create_future()
                self._put(len(more), sent, number=number, more=more)
                await sent
        self._put(number=number, ended=True)

    def _bytes(self, handler: grpc.RpcMethodHandler, reply: Any, request: Any = None) -> bytes:
        if self._tells:
            rpc.count(request, reply)
        found: bytes = handler.response_serializer(reply)
        if len(found) > _MOST_BYTES:
            raise TooLarge(f"the answer has {len(found)} bytes, more than a message may have")
        return found

    def _fail(self, number: int, error: TinsmithError) -> None:
        self._put(number=number, failed=errors.to_pb(error))

    def _put(self, size: int = 0, sent: asyncio.Future[None] | None = None, **answer: Any) -> None:
        self._due.append(_Due(answer, size, sent))
        self._changed.set()
