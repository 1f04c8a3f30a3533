"""What happens to a call before its method sees it.

Invariants: nothing of a message is received before its caller is known, and no more than a few unknown sizes
at once. (gRPC tells a message's size only with the whole message, and hands unary handlers whole messages;
so here every call is a stream, of which one message is read when there is room for it.) A message is parsed
only after its bytes were counted, and what it takes is given back when its call ends. It is looked at before
(`wire_check`), so no method sees fields that are not in the contract.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import suppress
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import Message

from services.common.contract.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    TinsmithError,
    Unauthenticated,
    Unavailable,
)
from services.common.process.pools import COMPUTE
from services.common.process.tasks import cancel_all
from services.gateway.access.body_budget import Account
from services.gateway.access.fair_slots import FairSlots
from services.gateway.access.limits import THREAD_ABOVE_BYTES
from services.gateway.application import Application
from services.gateway.edge import wire_check

KEY_METADATA = "x-api-key"


_AT_ONCE_S = 0.1
"""Most messages arrive with their call. For so long one may be read without a reservation; the few that do
at the same time are what bounds the memory they take."""

_MESSAGE_S = 60.0
"""Longest time in which a message may arrive: the largest at half a MiB/s."""

_OPEN_CALLS = 64
_OPEN_CALL_S = 600.0
_OPEN_BYTES = 4096
"""Bounds of what callers without a key may do: so many calls at once, so long, with so large a message."""

Handler: TypeAlias = Callable[..., Any]


class Reception(grpc.aio.ServerInterceptor):
    """Knows the caller, receives the message and counts it.

    Args:
        open_services: full names of services that need no key. Few such calls run at once.
    """

    def __init__(self, application: Application, open_services: Collection[str]) -> None:
        self._keys = application.keys
        self._gate = application.gate
        self._budget = application.budget
        self._limits = application.limits
        self._open_services = open_services
        self._places = FairSlots(self._budget.messages_at_once(self._limits.grpc_message_bytes))
        self._open_calls = 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        service = handler_call_details.method.rpartition("/")[0].removeprefix("/")
        if service in self._open_services:
            return _as_stream(handler, self._open(handler))
        try:
            owner = self._keys.owner_of(key_of(handler_call_details.invocation_metadata))
        except Unauthenticated as error:
            return _as_stream(handler, _refusing(error))
        return _as_stream(handler, self._received(handler, owner))

    def _received(self, handler: grpc.RpcMethodHandler, owner: str) -> Handler:
        """A handler that reads before the method is called."""
        kind = _request_class(handler)

        async def answer(_: object, context: grpc.aio.ServicerContext) -> Any:
            with self._gate.call(owner), self._budget.account(owner) as account:
                request = await self._message(context, owner, account, kind)
                return await handler.unary_unary(request, context)

        async def answers(_: object, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            with self._gate.call(owner), self._budget.account(owner) as account:
                request = await self._message(context, owner, account, kind)
                async for reply in handler.unary_stream(request, context):
                    yield reply

        async def converse(_: object, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            with self._gate.call(owner), self._budget.account(owner) as account:

                async def requests() -> AsyncIterator[Any]:
                    with suppress(_NoMessage):
                        while True:
                            yield await self._message(context, owner, account, kind)

                async for reply in handler.stream_stream(requests(), context):
                    yield reply

        if handler.unary_unary is not None:
            return answer
        return answers if handler.unary_stream is not None else converse

    def _open(self, handler: grpc.RpcMethodHandler) -> Handler:
        """A handler for callers without a key: one of few, with a small message, that ends in time."""
        method, kind = handler.unary_unary or handler.unary_stream, _request_class(handler)

        async def call(_: object, context: grpc.aio.ServicerContext) -> Any:
            if self._open_calls >= _OPEN_CALLS:
                raise Overloaded(f"{_OPEN_CALLS} calls without an API key run; try again in a moment")
            self._open_calls += 1
            try:
                async with asyncio.timeout(_OPEN_CALL_S):
                    raw = await self._raw(context, "", None)
                    if len(raw) > _OPEN_BYTES:
                        raise InvalidRequest(f"this call takes at most {_OPEN_BYTES} bytes")
                    return await method(wire_check.parsed(kind, raw, self._limits), context)
            except TimeoutError as error:
                raise Unavailable("this call has lasted long enough; make it again") from error
            finally:
                self._open_calls -= 1

        return call

    async def _message(
        self, context: grpc.aio.ServicerContext, owner: str, account: Account, kind: type[Message]
    ) -> Message:
        raw = await self._raw(context, owner, account)
        account.hold(len(raw))
        if len(raw) > THREAD_ABOVE_BYTES:
            return await COMPUTE.run(wire_check.parsed, kind, raw, self._limits)
        return wire_check.parsed(kind, raw, self._limits)

    async def _raw(self, context: grpc.aio.ServicerContext, owner: str, account: Account | None) -> bytes:
        """The message.

        Args:
            account: takes what a large or slow message needs; None: there is no room for such.

        Raises:
            Overloaded: it did not arrive at once, and there is no room for it.
            DeadlineExceeded: it did not arrive in time.
            InvalidRequest: there is none.
        """
        reading = asyncio.ensure_future(context.read())
        try:
            async with self._places.held(owner, 1):
                await asyncio.wait([reading], timeout=_AT_ONCE_S)
            if not reading.done():
                if account is None:
                    raise Overloaded("the message did not arrive with its call; send it again")
                account.expect(self._limits.grpc_message_bytes)
                await asyncio.wait([reading], timeout=_MESSAGE_S)
            if not reading.done():
                raise DeadlineExceeded(f"the message did not arrive within {_MESSAGE_S:g} s")
            raw = reading.result()
        finally:
            await cancel_all([reading])
        if raw is grpc.aio.EOF:
            raise _NoMessage("the call has no message")
        return raw


class _NoMessage(InvalidRequest):
    """The client has ended its side."""


def _as_stream(handler: grpc.RpcMethodHandler, call: Handler) -> grpc.RpcMethodHandler:
    """The handler of `call` for a method, to which gRPC gives nothing that was not asked for."""
    make = (
        grpc.stream_stream_rpc_method_handler
        if handler.response_streaming
        else grpc.stream_unary_rpc_method_handler
    )
    return make(call, response_serializer=handler.response_serializer)


def _refusing(error: TinsmithError) -> Handler:
    async def refuse(_: object, context: grpc.aio.ServicerContext) -> None:
        raise error

    return refuse


def _request_class(handler: grpc.RpcMethodHandler) -> type[Message]:
    """What a method takes: the generated code deserializes with `FromString` of the request's class."""
    return handler.request_deserializer.__self__


def key_of(metadata: Any) -> str | None:
    """The API key that a call carries."""
    for name, value in metadata or ():
        if name == KEY_METADATA:
            return value if isinstance(value, str) else value.decode()
    return None
