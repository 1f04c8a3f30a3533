"""The side that makes carried calls.

Invariants: a call ends with its answer, its typed error, its deadline, its caller or its stream, whichever is
first; the other side is told to leave what nobody waits for any more. What is asked in the same turn of the
loop goes together, within bounds; a large request goes in a call of its own, so that it keeps no small ones
waiting and can fail alone. A stream that ended is opened anew with the next call.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from services.common.contract import errors
from services.common.contract.errors import TinsmithError, Unavailable
from services.common.process import rpc
from services.common.process.carrier.answering import TOGETHER_BYTES
from services.common.process.tasks import cancel_all, detached
from services.common.telemetry import subject
from tinsmith.internal.v1 import carrier_pb2_grpc
from tinsmith.internal.v1.carrier_pb2 import CarriedAnswer, CarriedCall, CarryRequest, CarryResponse

M = TypeVar("M", bound=Message)


class Link:
    """Makes calls over one stream of a channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._stream: _Stream | None = None

    async def ask(self, method: str, request: Message, kind: type[M], seconds: float) -> M:
        """The answer of a method that answers once.

        Args:
            method: as gRPC names it: "/package.Service/Method".
            kind: of its response.
            seconds: how long it may take.

        Raises:
            TinsmithError: the typed error that it failed with.
            TimeoutError: no answer came in time.
            Unavailable, grpc.aio.AioRpcError: the stream ended.
        """
        data = request.SerializeToString()
        if len(data) > TOGETHER_BYTES:
            alone = self._channel.unary_unary(method)
            with _typed_errors():
                return kind.FromString(await alone(data, timeout=seconds, metadata=subject.metadata()))
        stream = self._open()
        number, call = stream.begin(method, data)
        # It has a copy until it is sent, and the call may last.
        del data
        try:
            found = await call.next(seconds)
        finally:
            stream.leave(number, call)
        if found is None:
            raise Unavailable(f"{method} ended without an answer")
        return kind.FromString(found)

    @contextmanager
    def several(self, method: str, request: Message, kind: type[M]) -> Iterator[Answers[M]]:
        """The answers of a method that answers several times. It is left when the context ends."""
        data = request.SerializeToString()
        if len(data) > TOGETHER_BYTES:
            alone = self._channel.unary_stream(method)(data, metadata=subject.metadata())
            try:
                yield Answers(_Alone(alone), kind)
            finally:
                alone.cancel()
            return
        stream = self._open()
        number, call = stream.begin(method, data)
        try:
            yield Answers(call, kind)
        finally:
            stream.leave(number, call)

    def finish(self) -> None:
        """Ends the stream when the calls that it carries are over."""
        if self._stream is not None:
            self._stream.finish()

    async def close(self) -> None:
        """Ends the stream, and what it carries."""
        if self._stream is not None:
            await self._stream.close()

    def _open(self) -> _Stream:
        if self._stream is None or self._stream.over:
            self._stream = _Stream(self._channel)
        return self._stream


class _Carried:
    """A call that a stream carries."""

    def __init__(self) -> None:
        self._answers: deque[bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self.ended = False

    def take(self, answer: bytes) -> None:
        self._answers.append(answer)
        self._wake()

    def end(self, error: Exception | None = None) -> None:
        self.ended, self._error = True, error
        self._wake()

    async def next(self, seconds: float) -> bytes | None:
        """The next answer; None when no more comes.

        Raises:
            TimeoutError: it did not come in time.
            Exception: that the call ended with.
        """
        if not self._answers and not self.ended:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            late = loop.call_later(seconds, self._wake)
            try:
                await self._waiter
            finally:
                late.cancel()
                self._waiter = None
        if self._answers:
            return self._answers.popleft()
        if not self.ended:
            raise TimeoutError(f"no answer in {seconds:g} s")
        if self._error is not None:
            raise self._error
        return None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Alone:
    """The same of a call of its own."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def next(self, seconds: float) -> bytes | None:
        with _typed_errors():
            async with asyncio.timeout(seconds):
                found = await self._call.read()
        return found if isinstance(found, bytes) else None


@contextmanager
def _typed_errors() -> Iterator[None]:
    """What a call of gRPC's own raises, as a carried one would. What has no name is the transport's."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        if rpc.CODE_METADATA in dict(error.trailing_metadata() or ()):
            raise rpc.from_rpc_error(error) from error
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise TimeoutError(error.details()) from error
        raise


class Answers(Generic[M]):
    """The answers of one call."""

    def __init__(self, call: _Carried | _Alone, kind: type[M]) -> None:
        self._call = call
        self._kind = kind

    async def read(self, seconds: float) -> M | None:
        """The next one; None when no more comes. Raises as `Link.ask`."""
        found = await self._call.next(seconds)
        return None if found is None else self._kind.FromString(found)


class _Stream:
    """One stream, and the calls that it carries.

    Attributes:
        over: it carries no more.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.over = False
        self._call: Any = carrier_pb2_grpc.CarrierServiceStub(channel).Carry()
        self._numbers = itertools.count(1)
        self._calls: dict[int, _Carried] = {}
        self._due: dict[int, CarriedCall] = {}
        self._left: list[int] = []
        self._changed = asyncio.Event()
        self._finishing = False
        self._task = detached(self._run(), "carried calls")

    def begin(self, method: str, data: bytes) -> tuple[int, _Carried]:
        number, call = next(self._numbers), _Carried()
        self._calls[number] = call
        self._due[number] = CarriedCall(
            number=number, method=method, request=data, traceparent=subject.traceparent()
        )
        self._changed.set()
        return number, call

    def leave(self, number: int, call: _Carried) -> None:
        """Nobody waits for this call any more."""
        self._calls.pop(number, None)
        if self._due.pop(number, None) is None and not call.ended:
            self._left.append(number)
        if self._left or self._finishing:
            self._changed.set()

    def finish(self) -> None:
        self._finishing = True
        self._changed.set()

    async def close(self) -> None:
        await cancel_all([self._task])

    async def _run(self) -> None:
        error: Exception = Unavailable("the stream ended that the call went over")
        writing = asyncio.create_task(self._write(), name="carried calls, writing")
        try:
            with _typed_errors():
                while isinstance(together := await self._call.read(), CarryResponse):
                    for answer in together.answers:
                        self._take(answer)
        except (TinsmithError, grpc.aio.AioRpcError) as raised:
            error = raised
        finally:
            self.over = True
            self._call.cancel()
            await cancel_all([writing])
            calls, self._calls = self._calls, {}
            for call in calls.values():
                call.end(error)

    def _take(self, answer: CarriedAnswer) -> None:
        call = self._calls.get(answer.number)
        if call is None:
            return
        kind = answer.WhichOneof("kind")
        if kind == "more":
            call.take(answer.more)
            return
        if kind == "last":
            call.take(answer.last)
        call.end(errors.from_pb(answer.failed) if kind == "failed" else None)

    async def _write(self) -> None:
        try:
            while not self._finishing or self._calls or self._left:
                self._changed.clear()
                while self._due or self._left:
                    await self._call.write(self._together())
                if not self._changed.is_set():
                    await self._changed.wait()
            await self._call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # Whoever reads hears of it, too.
            return

    def _together(self) -> CarryRequest:
        left, self._left = self._left, []
        found: list[CarriedCall] = []
        size = 0
        while self._due:
            number, call = next(iter(self._due.items()))
            size += len(call.request)
            if found and size > TOGETHER_BYTES:
                break
            found.append(call)
            del self._due[number]
        return CarryRequest(calls=found, left=left)
