"""The gRPC shell that every service uses: server, channel, and the one mapping of errors.

Invariant: a handler that raises a TinsmithError answers with that error's status, its code in trailing
metadata `tinsmith-code`, and its details (`error_details`); any other exception is logged with its traceback
and answers INTERNAL. `from_rpc_error` turns the status back into the same type on the caller's side.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, nullcontext
from functools import cache
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import Histogram
from redis.exceptions import RedisError

from services.common.contract import errors
from services.common.process import redis_errors
from services.common.process.serving import error_details
from services.common.process.serving.health import Health
from services.common.process.serving.server_limits import MAX_MESSAGE_BYTES, ServerLimits, write
from services.common.telemetry import access_log, subject, tracing
from services.common.telemetry.metrics import LONG_S
from services.common.telemetry.repeats import Repeats
from services.common.tls.wires import Identity, Role, ServerTls, name_of

log = logging.getLogger(__name__)

_REDIS_FAILED = Repeats(log, "Redis failed a call")
_UNFORESEEN = Repeats(log, "a call failed")

CODE_METADATA = "tinsmith-code"

HEALTH_SERVICE: str = health.SERVICE_NAME

_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A peer that vanished without closing the connection is noticed within half a minute.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
]


_TOLD_S = 10.0
_LOOPBACK = ("127.", "[::1]", "localhost:")
SECONDS = Histogram(
    "tinsmith_rpc_seconds", "gRPC calls, by how they ended", ["method", "code"], buckets=LONG_S
)
_seconds_of = cache(SECONDS.labels)
"""To look one's histogram up takes as long as to count in it."""

_CODES = {number: code.name for code in grpc.StatusCode for number in (code, code.value[0])}

_UNTRACED = ("/grpc.", "/tinsmith.internal.v1.CarrierService/")
"""Probes, reflection, and streams that last as long as their processes, each of whose calls has a span."""

Service = tuple[Callable[[Any, grpc.aio.Server], None], Any, str]
"""(generated add_..._to_server function, servicer, full service name)."""


class _ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Lets in whom the server is for, maps exceptions to statuses, and says on whose behalf handlers run.

    Args:
        tells: whether each call is a line of the access log.
        follows: whether the trace of a call with this metadata goes on here; otherwise one begins.
        write_s: as of `ServerLimits`.
    """

    def __init__(
        self, tells: bool, tls: ServerTls | None, follows: Callable[[Any], bool], write_s: float
    ) -> None:
        self._write_s = write_s
        self._tells = tells
        self._tls = tls
        self._follows = follows
        self._wrapped: dict[str, tuple[grpc.RpcMethodHandler, grpc.RpcMethodHandler]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        known = self._wrapped.get(method)
        if known is None or known[0] is not handler:
            known = self._wrapped[method] = handler, self._wrap(handler, method)
        return known[1]

    def _wrap(self, handler: grpc.RpcMethodHandler, method: str) -> grpc.RpcMethodHandler:
        inner, make = _parts(handler)
        answer = self._streamed if inspect.isasyncgenfunction(inner) else self._whole

        async def guarded(request: Any, context: grpc.aio.ServicerContext) -> Any:
            traceparent = _traceparent(context.invocation_metadata() or (), self._follows)
            with measured(method, traceparent, self._tells, lambda: _CODES.get(context.code(), "OK")):
                try:
                    if self._tls is not None:
                        self._tls.check(context.auth_context())
                    return await answer(inner, request, context)
                except grpc.aio.AbortError:
                    raise
                except Exception as error:
                    await _abort(context, typed(error, method))

        return make(
            guarded,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    async def _whole(
        self, inner: Callable[..., Awaitable[Any]], request: Any, context: grpc.aio.ServicerContext
    ) -> Any:
        reply = await inner(request, context)
        if self._tells:
            count(request, reply)
        return reply

    async def _streamed(
        self, inner: Callable[..., AsyncGenerator[Any]], request: Any, context: grpc.aio.ServicerContext
    ) -> None:
        async with aclosing(inner(request, context)) as replies:
            async for reply in replies:
                if self._tells:
                    count(None, reply)
                await write(context, reply, self._write_s)


def _parts(handler: grpc.RpcMethodHandler) -> tuple[Any, Callable[..., grpc.RpcMethodHandler]]:
    """The function of a handler, and what makes a handler of its kind."""
    if handler.unary_unary is not None:
        return handler.unary_unary, grpc.unary_unary_rpc_method_handler
    if handler.unary_stream is not None:
        return handler.unary_stream, grpc.unary_stream_rpc_method_handler
    if handler.stream_unary is not None:
        return handler.stream_unary, grpc.stream_unary_rpc_method_handler
    return handler.stream_stream, grpc.stream_stream_rpc_method_handler


@contextmanager
def measured(method: str, traceparent: str, tells: bool, code: Callable[[], str]) -> Iterator[None]:
    """Within it a call is answered, in a task of its own: it has a subject, is measured, and is a line of the
    access log.

    Args:
        traceparent: of its caller; empty: it tells none.
        tells: whether it is such a line.
        code: name of the status that it has ended with.
    """
    began = time.monotonic()
    ended = ""
    subject.begin(subject.Subject.of(traceparent))
    try:
        with tracing.call(method) if not method.startswith(_UNTRACED) else nullcontext():
            yield
    except asyncio.CancelledError:
        ended = "CANCELLED"
        raise
    finally:
        ended = ended or code()
        _seconds_of(method, ended).observe(time.monotonic() - began)
        if tells:
            access_log.write("gRPC", method, ended, time.monotonic() - began)


def _traceparent(metadata: Any, follows: Callable[[Any], bool]) -> str:
    for name, value in metadata:
        if name == subject.METADATA:
            text = value if isinstance(value, str) else value.decode("ascii", "replace")
            return text if follows(metadata) else ""
    return ""


def count(request: Any, reply: Any) -> None:
    """Counts the bytes of a call's messages."""
    about = subject.current()
    if about is not None:
        if isinstance(request, Message):
            about.received += request.ByteSize()
        about.sent += reply.ByteSize() if isinstance(reply, Message) else 0


def typed(error: Exception, method: str) -> errors.TinsmithError:
    """What a handler raised, as a typed error. One that nobody foresaw is logged."""
    if isinstance(error, errors.TinsmithError):
        return error
    if isinstance(error, RedisError):
        _REDIS_FAILED.failed(method, error)
        return redis_errors.typed(error)
    _UNFORESEEN.failed(method, error, foreseen=False)
    return errors.Internal(f"{type(error).__name__}: {error}")


async def _abort(context: grpc.aio.ServicerContext, error: errors.TinsmithError) -> None:
    code = grpc.StatusCode[error.grpc_status]
    status = error_details.status_of(error, code.value[0])
    trailers = (
        (CODE_METADATA, error.code),
        (error_details.DETAILS_METADATA, status.SerializeToString()),
    )
    try:
        async with asyncio.timeout(_TOLD_S):
            await context.abort(code, status.message, trailing_metadata=trailers)
    except grpc.aio.AbortError:
        raise
    except (TimeoutError, grpc.aio.BaseError) as unsent:
        # Its client reads nothing, and is told when it does, or it has gone. Of any other exception, an
        # AbortError of ours too, gRPC logs a traceback: for each call, as anybody may make it without a key.
        raise asyncio.CancelledError from unsent


def from_rpc_error(error: grpc.aio.AioRpcError) -> errors.TinsmithError:
    """The typed error of a failed call."""
    metadata = dict(error.trailing_metadata() or ())
    message = error.details() or error.code().name
    code = metadata.get(CODE_METADATA)
    if isinstance(code, str):
        user = error.code() in (
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.NOT_FOUND,
            grpc.StatusCode.PERMISSION_DENIED,
            grpc.StatusCode.UNAUTHENTICATED,
            grpc.StatusCode.ALREADY_EXISTS,
        )
        return errors.by_code(code, "user" if user else "server", message)
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.DeadlineExceeded(message)
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return errors.Overloaded(message)
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return errors.Unavailable(message)
    return errors.Internal(f"{error.code().name}: {message}")


class RpcServer:
    """A running gRPC server with health and reflection."""

    def __init__(self, server: grpc.aio.Server, port: int, checker: Health, names: list[str]) -> None:
        self._server = server
        self._health = checker
        self._names = names
        self.port = port

    async def drain(self, grace: float) -> None:
        """Reports NOT_SERVING, refuses new calls and lets running ones finish for `grace` seconds."""
        self._health.tell(("", *self._names), health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._server.stop(grace)


async def serve(
    services: Sequence[Service],
    bind: str,
    reuse_port: bool = False,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    limits: ServerLimits | None = None,
    tells: bool = False,
    tls: ServerTls | None = None,
    follows: Callable[[Any], bool] = lambda metadata: True,
) -> RpcServer:
    """Starts a server for the services on "host:port"; port 0 takes a free one.

    Args:
        interceptors: what their handlers raise is mapped like the errors of others.
        limits: what is taken of peers; None: what services of one cluster need.
        tells: whether each call is a line of the access log.
        tls: the server's certificate, and who may call; None: in the clear.
        follows: whether the trace of a call with this metadata goes on here; otherwise one begins.

    Raises:
        errors.Unavailable: the address cannot be bound.
    """
    taken = limits or ServerLimits()
    server = grpc.aio.server(
        interceptors=(_ErrorInterceptor(tells, tls, follows, taken.write_s), *interceptors),
        options=[*_OPTIONS, *taken.options(), ("grpc.so_reuseport", int(reuse_port))],
    )
    checker = Health()
    health_pb2_grpc.add_HealthServicer_to_server(checker, server)
    names = [name for _, _, name in services]
    for add, servicer, _ in services:
        add(servicer, server)
    reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    if tls is None and limits is None and not bind.startswith(_LOOPBACK):
        log.warning("services on %s are in the clear: whoever reaches them may call them (--identity)", bind)
    try:
        port = server.add_secure_port(bind, tls.credentials()) if tls else server.add_insecure_port(bind)
    except RuntimeError as error:
        raise errors.Unavailable(f"cannot listen on {bind}: {error}") from error
    await server.start()
    checker.tell(("", *names), health_pb2.HealthCheckResponse.SERVING)
    return RpcServer(server, port, checker, names)


def address(host: str, port: int) -> str:
    """`host:port` as gRPC takes it; an IPv6 address stands in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def channel(address: str, who: Identity | None = None, peer: Role = "gateway") -> grpc.aio.Channel:
    """A channel to "host:port". Calls must carry a timeout.

    Args:
        who: this process; None: in the clear.
        peer: whom the address must turn out to be.
    """
    options = [*_OPTIONS, ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]
    if who is None:
        return grpc.aio.insecure_channel(address, options=options)
    named = ("grpc.ssl_target_name_override", name_of(peer))
    return grpc.aio.secure_channel(address, who.channel_credentials(), options=[*options, named])
