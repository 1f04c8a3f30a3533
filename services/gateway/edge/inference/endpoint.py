"""Endpoints for text: who calls, and in which form an error is told.

Invariant: the caller is known before the body is read, and a client that goes away ends what it asked for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack
from typing import Any, TypeVar

import msgspec
from redis.exceptions import RedisError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from services.common.contract.errors import Internal, TinsmithError
from services.common.process import redis_errors
from services.common.process.tasks import cancel_all
from services.common.telemetry.repeats import Repeats
from services.gateway.application import Application
from services.gateway.audit.acts import ACTS
from services.gateway.edge.http.codec.results_out import JSON
from services.gateway.edge.http.routes import Handler, acted, address_of
from services.gateway.identity.rights import NEEDS

log = logging.getLogger(__name__)

_FAILED = Repeats(log, "a request was answered with an error of this side")
_UNFORESEEN = Repeats(log, "a request failed")

ErrorForm = Callable[[TinsmithError], tuple[int, Any]]
"""HTTP status and JSON body of an error."""

T = TypeVar("T")

_BEARER = "bearer "
_KEEP_ALIVE_S = 15.0
_KEEP_ALIVE = b": waiting\n\n"


def endpoint(
    application: Application, method: str, handler: Handler, form: ErrorForm
) -> Callable[[Request], Awaitable[Response]]:
    """A Starlette endpoint that answers what the handler answers, or its error in this form.

    Args:
        method: of `rights.NEEDS`.
    """
    assert method in NEEDS, f"nobody has decided who may call {method}"
    assert method in ACTS, f"nobody has decided what is written down of {method}"

    async def answer(request: Request) -> Response:
        try:
            caller = await application.door.enter(key_of(request), method, address_of(request))
            with ExitStack() as counted:
                counted.enter_context(application.gate.call(caller.owner))
                response = await acted(application, request, method, caller, handler)
                if isinstance(response, EventStream):
                    # The call is under way until its last event.
                    response.hold(counted.pop_all())
                return response
        except ClientDisconnect:
            raise
        except Exception as error:
            return refusal(typed(error, request), form)

    return answer


def routes_of(
    application: Application, paths: Sequence[str], table: Sequence[tuple[str, str, Handler]], form: ErrorForm
) -> list[Route]:
    """The routes of an API, below each of the paths that it is served at.

    Args:
        table: method, path, handler.
    """
    return [
        Route(f"{path}/{below}", endpoint(application, f"{method} {below}", handler, form), methods=[method])
        for path in paths
        for method, below, handler in table
    ]


def key_of(request: Request) -> str | None:
    """The API key of a request: X-API-Key, or a bearer token."""
    given = request.headers.get("x-api-key")
    authorization = request.headers.get("authorization", "")
    if given is None and authorization[: len(_BEARER)].lower() == _BEARER:
        given = authorization[len(_BEARER) :].strip()
    return given


def typed(error: Exception, request: Request) -> TinsmithError:
    """Any exception as an error that can be told."""
    if isinstance(error, RedisError):
        error = redis_errors.typed(error)
    if not isinstance(error, TinsmithError):
        _UNFORESEEN.failed(f"{request.method} {request.url.path}", error, foreseen=False)
        return Internal(f"{type(error).__name__} in this gateway; its log says more")
    if error.http_status >= 500:
        _FAILED.failed(error.code, f"{request.method} {request.url.path}: {error.message}")
    return error


def refusal(error: TinsmithError, form: ErrorForm) -> Response:
    """An error as a response."""
    status, body = form(error)
    headers = {"retry-after": str(error.retry_after)} if error.retry_after else None
    return Response(msgspec.json.encode(body), status, headers, media_type=JSON)


class EventStream(Response):
    """A response of server-sent events.

    Args:
        events: the frames. It does not raise.
        close: is awaited when the response has ended, however it did.
    """

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], Awaitable[object]]) -> None:
        self._stream = StreamingResponse(
            _kept_alive(events), headers={"cache-control": "no-cache"}, media_type="text/event-stream"
        )
        self._close = close
        self._held = ExitStack()
        self.background = None

    def hold(self, held: ExitStack) -> None:
        """Closes this too, in the end."""
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._stream(scope, receive, send)
        finally:
            with self._held:
                await self._close()


async def streamed(
    asked: AbstractAsyncContextManager[T], events: Callable[[T], AsyncIterator[bytes]]
) -> EventStream:
    """What is told of a question, as events. The question ends with the response."""
    async with AsyncExitStack() as held:
        parts = await held.enter_async_context(asked)
        return EventStream(events(parts), held.pop_all().aclose)


async def _kept_alive(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The events, and comments while none comes, so that no proxy takes the connection for dead."""
    while True:
        following = asyncio.ensure_future(anext(events, None))
        try:
            while not following.done():
                await asyncio.wait({following}, timeout=_KEEP_ALIVE_S)
                if not following.done():
                    yield _KEEP_ALIVE
        finally:
            await cancel_all([following])
        event = following.result()
        if event is None:
            return
        yield event


def event(data: object, name: str = "") -> bytes:
    """A frame: one event with its data as JSON."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"
