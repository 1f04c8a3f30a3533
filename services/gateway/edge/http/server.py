"""The HTTP server: routes, the one mapping of errors to HTTP, and the listening socket.

Invariant: every response has a body, and every error is {"detail": a sentence, "code": a
reason}. (The SDK takes a 400 without a body for a broken proxy and repeats it.)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from typing import cast

import uvicorn
from redis.exceptions import RedisError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, ExceptionHandler

from services.common.contract.errors import Internal, TinsmithError, Unavailable
from services.common.process import redis_errors
from services.gateway.application import Application
from services.gateway.edge.anthropic import routes as anthropic
from services.gateway.edge.http import (
    checkpoints,
    futures,
    runs,
    sampling,
    session_search,
    sessions,
    tokenizers,
    training,
)
from services.gateway.edge.http.checkpoints import API
from services.gateway.edge.http.connection import ConnectionLimits, Connections, bounded
from services.gateway.edge.http.routes import Call, Handler, reply
from services.gateway.edge.measured import measured
from services.gateway.edge.openai import routes as openai

log = logging.getLogger(__name__)

CHECKPOINT = "training_runs/{training_run_id}/checkpoints/{kind}/{name}"
SIGNED = f"{checkpoints.DOWNLOADS}/{{training_run_id}}/{{kind}}/{{name}}/{{version:int}}/{{file}}"
TABLE: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "client/config", sessions.client_config),
    ("POST", "client/dynamic_config", sessions.client_dynamic_config),
    ("GET", "auth/apikey/me", sessions.own_api_key),
    ("DELETE", "auth/apikey/me", sessions.delete_own_api_key),
    ("POST", "create_session", sessions.create_session),
    ("POST", "session_heartbeat", sessions.session_heartbeat),
    ("POST", "sessions/{session_id}/finish", sessions.finish_session),
    ("POST", "telemetry", sessions.telemetry),
    ("GET", "get_server_capabilities", sessions.get_server_capabilities),
    ("GET", "tokenizers/{base_model:path}", tokenizers.get_tokenizer),
    ("POST", "create_model", training.create_model),
    ("POST", "get_info", training.get_info),
    ("POST", "forward_backward", training.forward_backward),
    ("POST", "forward", training.forward),
    ("POST", "optim_step", training.optim_step),
    ("POST", "save_weights", training.save_weights),
    ("POST", "load_weights", training.load_weights),
    ("POST", "save_weights_for_sampler", training.save_weights_for_sampler),
    ("POST", "weights_info", checkpoints.weights_info),
    ("POST", "save_weights_external", checkpoints.save_weights_external),
    ("POST", "copy_weights", checkpoints.copy_weights),
    ("POST", "unload_model", runs.unload_model),
    ("GET", "training_runs", runs.list_runs),
    ("GET", "training_runs/{training_run_id}", runs.get_run),
    ("GET", "training_runs/{training_run_id}/checkpoints", checkpoints.list_of_run),
    ("GET", f"{CHECKPOINT}/external_weights_urls", checkpoints.external_weights_urls),
    ("DELETE", CHECKPOINT, checkpoints.delete),
    ("POST", f"{CHECKPOINT}/publish", checkpoints.publish),
    ("DELETE", f"{CHECKPOINT}/publish", checkpoints.unpublish),
    ("PUT", f"{CHECKPOINT}/ttl", checkpoints.set_ttl),
    ("GET", "checkpoints", checkpoints.list_all),
    ("GET", "sessions", session_search.list_sessions),
    ("POST", "sessions/search", session_search.search),
    ("GET", "sessions/{session_id}", session_search.get_session),
    ("PUT", "sessions/{session_id}/project", session_search.assign_project),
    ("GET", "sessions/{session_id}/trace_export", session_search.trace_export),
    ("GET", "audit", session_search.audit),
    ("GET", "billing/usage/events", session_search.billing_usage),
    ("GET", "billing/usage/checkpoints/current", session_search.checkpoint_storage),
    ("POST", "create_sampling_session", sampling.create_sampling_session),
    ("GET", "samplers/{sampling_session_id}", sampling.get_sampler),
    ("POST", "asample", sampling.asample),
    ("POST", "retrieve_future", futures.retrieve_future),
    ("POST", "retrieve_futures", futures.retrieve_futures),
    ("POST", "cancel_future", futures.cancel_future),
)
"""Method, path below /api/v1, handler."""


def create_app(application: Application) -> ASGIApp:
    """The ASGI application over the application layer."""

    def route(method: str, path: str, handler: Handler) -> Route:
        async def endpoint(request: Request) -> Response:
            owner = application.keys.owner_of(request.headers.get("x-api-key"))
            with application.gate.call(owner):
                return await handler(Call(request, owner, application, application.budget))

        return Route(f"{API}/{path}", endpoint, methods=[method])

    async def healthz(request: Request) -> Response:
        if application.draining:
            raise Unavailable("this gateway is shutting down")
        return reply({"status": "ok"})

    async def readyz(request: Request) -> Response:
        await application.readiness.check()
        return await healthz(request)

    handlers: dict[type[Exception] | int, ExceptionHandler] = {
        TinsmithError: _tinsmith_error,
        RedisError: _redis_error,
        HTTPException: _http_exception,
        Exception: _unexpected,
    }

    async def download(request: Request) -> Response:
        return await checkpoints.download(application, request)

    routes = [
        Route(f"{API}/healthz", healthz, methods=["GET"]),
        Route(f"{API}/readyz", readyz, methods=["GET"]),
        # SDKs fetch these without their API key; the signature in the query is checked instead.
        Route(f"{API}/{SIGNED}", download, methods=["GET"]),
    ]
    routes += [route(*row) for row in TABLE] + openai.routes(application)
    routes += anthropic.routes(application)
    return measured(Starlette(routes=routes, exception_handlers=handlers), routes)


def _error(error: TinsmithError) -> Response:
    headers = {"retry-after": str(error.retry_after)} if error.retry_after else None
    return reply({"detail": error.message, "code": error.code}, error.http_status, headers)


async def _tinsmith_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TinsmithError)
    if error.http_status >= 500:
        log.warning("%s %s: %s", request.method, request.url.path, error.message)
    return _error(error)


async def _redis_error(request: Request, error: Exception) -> Response:
    log.warning("%s %s: %s", request.method, request.url.path, error)
    assert isinstance(error, RedisError)
    return _error(redis_errors.typed(error))


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    detail = str(error.detail)
    if error.status_code == 404:
        detail = f"{request.url.path} is not served here"
    elif error.status_code == 405:
        detail = f"{request.url.path} does not take {request.method}"
    return reply({"detail": detail}, error.status_code, dict(error.headers or {}))


async def _unexpected(request: Request, error: Exception) -> Response:
    # The traceback is logged by the server, to which Starlette raises the error again.
    return _error(Internal(f"{type(error).__name__} in this gateway; its log says more"))


class HttpServer:
    """The application on a socket that other gateways of this machine may share."""

    def __init__(
        self, application: Application, host: str, port: int, limits: ConnectionLimits | None = None
    ) -> None:
        """Binds the socket, so that `port` is known before serving starts; port 0 takes a free one.

        Raises:
            Unavailable: the address cannot be bound.
        """
        self._socket = _bind(host, port)
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            create_app(application),
            loop="none",
            # uvicorn calls it as it would call a class.
            http=cast(type[asyncio.Protocol], bounded(Connections(limits or ConnectionLimits()))),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=20,
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> asyncio.Task[None]:
        """Serves until `drain`. The task ends early only when serving fails."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="http")
        return self._task

    async def drain(self) -> None:
        """Stops accepting and returns when running requests are answered."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task


class _Server(uvicorn.Server):
    """uvicorn, but signals are the process's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise Unavailable(f"cannot listen on {host}:{port}: {error}") from error
    listener.setblocking(False)
    return listener
