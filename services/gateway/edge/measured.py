"""On whose behalf an HTTP request is answered, how long it takes, and how it ends.

Invariant: a request is counted once, under the route that it matched; whatever no route serves is one route,
so that no client can make a new one. A trace that its client began goes on here for those alone who have an
API key: whoever else sends one cannot have us export it.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from functools import cache

from prometheus_client import Histogram
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.telemetry import access_log, subject, tracing
from services.common.telemetry.metrics import LONG_S
from services.gateway.edge.http.wire.fields import field_of

SECONDS = Histogram(
    "tinsmith_http_seconds",
    "HTTP requests, from their headers or small body to the end of the answer; long polls included",
    ["route", "status"],
    buckets=LONG_S,
)
NO_ROUTE = "none"
_PROBES = ("/healthz", "/readyz")
"""They come every few seconds, and no trace of them is worth keeping."""
_TRACEPARENT = subject.METADATA.encode()
_METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH")


def measured(
    app: ASGIApp, routes: Sequence[Route], tells: bool, follows: Callable[[Request], bool]
) -> ASGIApp:
    """The application, every request of which is measured.

    Args:
        tells: whether each is a line of the access log.
        follows: whether the trace of a request's client goes on here; otherwise one begins.
    """
    paths: dict[object, str] = {route.endpoint: route.path for route in routes}
    # Routes and statuses are few; to look one's histogram up takes as long as to count in it.
    seconds_of = cache(SECONDS.labels)

    async def measure(scope: Scope, receive: Receive, send: Send) -> None:
        began = time.monotonic()
        # Every request has a task of its own.
        about = subject.begin(subject.Subject.of(_traceparent(scope, follows)))
        # What is left when the client goes away before it has an answer.
        status = "gone"

        def told(message: Message) -> Awaitable[None]:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            elif tells:
                about.sent += len(message.get("body", b""))
            return send(message)

        async def heard() -> Message:
            message = await receive()
            about.received += len(message.get("body", b""))
            return message

        with nullcontext() if scope["path"].endswith(_PROBES) else tracing.call("HTTP") as span:
            try:
                await app(scope, heard if tells else receive, told)
            finally:
                route, method = paths.get(scope.get("endpoint"), NO_ROUTE), _method(scope)
                seconds_of(route, status).observe(time.monotonic() - began)
                if span is not None:
                    span.update_name(f"{method} {route}")
                    span.set_attribute("http.response.status_code", status)
                if tells:
                    access_log.write(method, route, status, time.monotonic() - began)

    return measure


def _traceparent(scope: Scope, follows: Callable[[Request], bool]) -> str:
    found = field_of(scope, _TRACEPARENT)
    return found if found and follows(Request(scope)) else ""


def _method(scope: Scope) -> str:
    """A client may send any word as a method."""
    return scope["method"] if scope["method"] in _METHODS else "other"
