"""How long HTTP requests take, and how they end.

Invariant: a request is counted once, under the route that it matched; whatever no route serves is one route,
so that no client can make a new one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from prometheus_client import Histogram
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.telemetry.metrics import LONG_S

SECONDS = Histogram(
    "tinsmith_http_seconds",
    "HTTP requests, from their headers to the end of the answer; long polls included",
    ["route", "status"],
    buckets=LONG_S,
)
NO_ROUTE = "none"


def measured(app: ASGIApp, routes: Sequence[Route]) -> ASGIApp:
    """The application, every request of which is measured."""
    paths: dict[object, str] = {route.endpoint: route.path for route in routes}

    async def measure(scope: Scope, receive: Receive, send: Send) -> None:
        began = time.monotonic()
        # What is left when the client goes away before it has an answer.
        status = "gone"

        async def told(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await app(scope, receive, told)
        finally:
            route = paths.get(scope.get("endpoint"), NO_ROUTE)
            SECONDS.labels(route, status).observe(time.monotonic() - began)

    return measure
