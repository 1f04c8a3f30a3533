"""What happens to a call before its method sees it.

Invariants: nothing of a message is received before its caller is known, and no more than a few unknown sizes
at once. (gRPC tells a message's size only with the whole message, and hands unary handlers whole messages;
so here every call is a stream, of which one message is read when there is room for it.) A message is parsed
only after its bytes were counted, and what it takes is given back with its first answer. It is looked at
before (`wire_check`), so no method sees fields that are not in the contract.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import Message

from services.common.contract.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    Unavailable,
)
from services.common.process.pools import COMPUTE
from services.common.process.tasks import cancel_all
from services.common.telemetry import subject
from services.gateway.access.body_budget import Account
from services.gateway.access.fair_slots import FairSlots
from services.gateway.access.limits import THREAD_ABOVE_BYTES
from services.gateway.access.page_turns import LISTS
from services.gateway.access.shares import Shares
from services.gateway.application import Application
from services.gateway.audit.acts import ACTS, Source
from services.gateway.audit.trail import Act
from services.gateway.edge import wire_check
from services.gateway.identity.door import address_of
from services.gateway.identity.key import Caller
from services.gateway.identity.rights import NEEDS

KEY_METADATA = "x-api-key"


_AT_ONCE_S = 0.1
"""Most messages arrive with their call. For so long one may be read without a reservation; the few that do
at the same time are what bounds the memory they take."""

_MESSAGE_S = 60.0
"""Longest time in which a message may arrive: the largest at half a MiB/s."""

_OPEN_CALLS = 64
_OPEN_STREAMS = 64
_OPEN_CALL_S = 600.0
_OPEN_BYTES = 4096
"""Bounds of what callers without a key may do: so many calls that have one answer at once, and so many with
several, so long, with so large a message. An address never has more of them than is left for others."""

Handler: TypeAlias = Callable[..., Any]


class Reception(grpc.aio.ServerInterceptor):
    """Knows the caller, receives the message and counts it.

    Args:
        open_services: full names of services that need no key. Few such calls run at once, and their messages
            are received beside those of callers with a key.
    """

    def __init__(self, application: Application, open_services: Collection[str]) -> None:
        self._door = application.door
        self._audit = application.audit
        self._gate = application.gate
        self._budget = application.budget
        self._answers = application.answers
        self._page_turns = application.page_turns
        self._limits = application.limits
        self._open_services = open_services
        messages = self._budget.messages_at_once(self._limits.grpc_message_bytes)
        self._places = FairSlots(max(1, messages - 1))
        self._open_places = FairSlots(1)
        self._open_calls, self._open_streams = Shares(_OPEN_CALLS), Shares(_OPEN_STREAMS)

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
            return _as_stream(handler, self._open(handler), handler.response_streaming)
        method = handler_call_details.method.rpartition("/")[2]
        assert method in NEEDS, f"nobody has decided who may call {method}"
        assert method in ACTS, f"nobody has decided what is written down of {method}"
        pieces = handler.response_streaming or method in LISTS
        return _as_stream(handler, self._received(handler, method), pieces)

    def _received(self, handler: grpc.RpcMethodHandler, method: str) -> Handler:
        """A handler that knows the caller, and reads, before the method is called."""
        kind = _request_class(handler)

        @asynccontextmanager
        async def entered(
            context: grpc.aio.ServicerContext,
        ) -> AsyncIterator[tuple[Caller, Account, Act]]:
            address = address_of(context.peer())
            caller = await self._door.enter(key_of(context.invocation_metadata()), method, address)
            owner = caller.owner
            with (
                self._gate.call(owner),
                self._budget.account(owner) as account,
                self._audit.act(method, owner, caller.key_id, address) as act,
            ):
                yield caller, account, act

        async def answer(_: object, context: grpc.aio.ServicerContext) -> Any:
            async with entered(context) as (caller, account, act):
                request = await self._message(context, caller.owner, account, kind)
                act.saw(fields_of(request))
                reply = await handler.unary_unary(request, context)
                act.saw(fields_of(reply))
                return reply

        async def page(_: object, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            async with entered(context) as (caller, account, act):
                owner = caller.owner
                request = await self._message(context, owner, account, kind)
                act.saw(fields_of(request))
                with self._answers.account(owner) as room:
                    async with self._page_turns.held(owner):
                        reply = await handler.unary_unary(request, context)
                    act.saw(fields_of(reply))
                    if not room.take_now(self._answers.of_result(reply.ByteSize())):
                        raise self._answers.refusal(owner)
                    # Counted until gRPC has taken it, for which a client may let it wait.
                    yield reply

        async def answers(_: object, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            async with entered(context) as (caller, account, act):
                request = await self._message(context, caller.owner, account, kind)
                act.saw(fields_of(request))
                replies = handler.unary_stream(request, context)
                del request
                async for reply in replies:
                    # Methods keep nothing of a request that they have begun to answer.
                    account.close()
                    yield reply

        async def converse(_: object, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            async with entered(context) as (caller, account, _act):
                owner = caller.owner

                async def requests() -> AsyncIterator[Any]:
                    with suppress(_NoMessage):
                        while True:
                            yield await self._message(context, owner, account, kind)

                async for reply in handler.stream_stream(requests(), context):
                    yield reply

        if handler.unary_unary is not None:
            return page if method in LISTS else answer
        return answers if handler.unary_stream is not None else converse

    def _open(self, handler: grpc.RpcMethodHandler) -> Handler:
        """A handler for callers without a key: one of few, with a small message, that ends in time."""
        method, kind = handler.unary_unary or handler.unary_stream, _request_class(handler)
        calls = self._open_calls if handler.unary_unary is not None else self._open_streams

        async def call(_: object, context: grpc.aio.ServicerContext) -> Any:
            address = address_of(context.peer())
            if not calls.take(address, 1):
                if calls is self._open_streams:
                    # To clients that watch a server's health it has none to watch, and they go on.
                    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "too many streams without an API key")
                raise Overloaded("too many calls without an API key run; try again in a moment")
            try:
                async with asyncio.timeout(_OPEN_CALL_S):
                    raw = await self._raw(context, self._open_places.held(address, 1), None)
                    if len(raw) > _OPEN_BYTES:
                        raise InvalidRequest(f"this call takes at most {_OPEN_BYTES} bytes")
                    return await method(wire_check.parsed(kind, raw, self._limits), context)
            except TimeoutError as error:
                raise Unavailable("this call has lasted long enough; make it again") from error
            finally:
                calls.add(address, -1)

        return call

    async def _message(
        self, context: grpc.aio.ServicerContext, owner: str, account: Account, kind: type[Message]
    ) -> Message:
        subject.note(owner=owner)
        raw = await self._raw(context, self._places.held(owner, 1), account)
        subject.received(len(raw))
        account.hold(len(raw))
        if len(raw) > THREAD_ABOVE_BYTES:
            return await COMPUTE.run(wire_check.parsed, kind, raw, self._limits)
        return wire_check.parsed(kind, raw, self._limits)

    async def _raw(
        self,
        context: grpc.aio.ServicerContext,
        place: AbstractAsyncContextManager[None],
        account: Account | None,
    ) -> bytes:
        """The message.

        Args:
            place: to receive it in while its size is not known.
            account: takes what a large or slow message needs; None: there is no room for such.

        Raises:
            Overloaded: it did not arrive at once, and there is no room for it.
            DeadlineExceeded: it did not arrive in time.
            InvalidRequest: there is none.
        """
        reading: asyncio.Task[Any] | None = None
        try:
            async with place:
                # Not before there is a place: what is read is there as a whole, however large.
                reading = asyncio.create_task(context.read())
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


def _as_stream(handler: grpc.RpcMethodHandler, call: Handler, yields: bool) -> grpc.RpcMethodHandler:
    """The handler of `call` for a method, to which gRPC gives nothing that was not asked for.

    Args:
        yields: whether `call` yields its answers, which are the same bytes as one that is returned.
    """
    make = grpc.stream_stream_rpc_method_handler if yields else grpc.stream_unary_rpc_method_handler
    return make(call, response_serializer=handler.response_serializer)


def _request_class(handler: grpc.RpcMethodHandler) -> type[Message]:
    """What a method takes: the generated code deserializes with `FromString` of the request's class."""
    return handler.request_deserializer.__self__


def fields_of(message: Message) -> Source:
    """The fields of a message by name, those of its messages as "field.field"; of an enum, the name."""

    def value(name: str) -> object:
        found: Any = message
        for part in name.split("."):
            field = found.DESCRIPTOR.fields_by_name.get(part)
            if field is None or field.is_repeated:
                return None
            found = getattr(found, part)
            if field.enum_type is not None:
                known = field.enum_type.values_by_number.get(found)
                return known.name if found and known else None
            if field.type != field.TYPE_MESSAGE:
                # What is not set says nothing.
                return found or None
        return None

    return value


def key_of(metadata: Any) -> str | None:
    """The API key that a call carries."""
    for name, value in metadata or ():
        if name == KEY_METADATA:
            return value if isinstance(value, str) else value.decode()
    return None
