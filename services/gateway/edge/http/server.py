"""The HTTP server: routes, the one mapping of errors to HTTP, and the listening socket.

Invariant: every response has a body, and every error is {"detail": a sentence, "code": a
reason}. (The SDK takes a 400 without a body for a broken proxy and repeats it.)
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import uvicorn
from redis.exceptions import RedisError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, ExceptionHandler, Receive, Scope, Send

from services.common.contract.errors import Internal, PermissionDenied, TinsmithError, Unavailable
from services.common.process import redis_errors
from services.common.telemetry.repeats import Repeats
from services.common.tls.files import KeyFiles
from services.common.tls.wires import https
from services.gateway.application import Application
from services.gateway.audit.acts import ACTS
from services.gateway.edge.anthropic import routes as anthropic
from services.gateway.edge.books import audit_routes, billing_routes
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
from services.gateway.edge.http.routes import API, Handler, acted, address_of, counted, reply
from services.gateway.edge.http.wire.connection import ConnectionLimits, Connections, bounded
from services.gateway.edge.http.wire.fields import field_of
from services.gateway.edge.http.wire.handshake import Handshakes
from services.gateway.edge.inference.endpoint import key_of
from services.gateway.edge.measured import measured
from services.gateway.edge.openai import routes as openai
from services.gateway.identity.rights import NEEDS
from services.gateway.identity.tokens import REJECTED

log = logging.getLogger(__name__)

_REDIS_FAILED = Repeats(log, "Redis failed a request")
_FAILED = Repeats(log, "a request was answered with an error of this side")

Endpoint = Callable[[Request], Awaitable[Response]]
Answer = Callable[[Request, Exception], Awaitable[Response]]

CHECKPOINT = "training_runs/{training_run_id}/checkpoints/{kind}/{name}"
SIGNED = f"{checkpoints.DOWNLOADS}/{{training_run_id}}/{{kind}}/{{name}}/{{version}}/{{file}}"
SIGNED_TRACE = f"{session_search.TRACES}/{{session_id}}"
TABLE: tuple[tuple[str, str, Handler], ...] = (
    # What a client sends for every sample. The table is looked through from its beginning.
    ("POST", "asample", sampling.asample),
    ("POST", "retrieve_future", futures.retrieve_future),
    ("POST", "retrieve_futures", futures.retrieve_futures),
    ("POST", "client/config", sessions.client_config),
    ("POST", "client/dynamic_config", sessions.client_dynamic_config),
    ("POST", "auth/token", sessions.exchange_key),
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
    ("GET", "audit", audit_routes.audit),
    ("GET", "billing/usage/events", billing_routes.usage),
    ("GET", "billing/usage/checkpoints/current", billing_routes.storage),
    ("POST", "create_sampling_session", sampling.create_sampling_session),
    ("GET", "samplers/{sampling_session_id}", sampling.get_sampler),
    ("POST", "cancel_future", futures.cancel_future),
)
"""Method, path below /api/v1, handler."""


def create_app(application: Application, tells: bool) -> ASGIApp:
    """The ASGI application over the application layer.

    Args:
        tells: whether each request is a line of the access log.
    """

    def route(method: str, path: str, handler: Handler) -> Route:
        name = f"{method} {path}"
        assert name in NEEDS, f"nobody has decided who may call {name}"
        assert name in ACTS, f"nobody has decided what is written down of {name}"

        async def endpoint(request: Request) -> Response:
            key = field_of(request.scope, b"x-api-key")
            caller = await application.door.enter(key, name, address_of(request))
            with application.gate.call(caller.owner):
                response = await acted(application, request, name, caller, handler)
                return counted(application, caller.owner, response)

        return Route(f"{API}/{path}", endpoint, methods=[method])

    async def healthz(request: Request) -> Response:
        if application.draining:
            raise Unavailable("this gateway is shutting down")
        return reply({"status": "ok"})

    async def readyz(request: Request) -> Response:
        await application.readiness.check()
        return await healthz(request)

    handlers: dict[type[Exception], Answer] = {
        TinsmithError: _tinsmith_error,
        RedisError: _redis_error,
        ClientDisconnect: _gone,
        HTTPException: _http_exception,
        Exception: _unexpected,
    }

    def signed(path: str, handler: Callable[[Application, Request], Awaitable[Response]]) -> Route:
        async def endpoint(request: Request) -> Response:
            try:
                return await handler(application, request)
            except PermissionDenied as error:
                await application.door.refuse(error, f"GET {path.partition('/')[0]}", address_of(request))
                raise

        return Route(f"{API}/{path}", endpoint, methods=["GET"])

    def follows(request: Request) -> bool:
        return application.keys.knows(key_of(request))

    routes = [route(*row) for row in TABLE] + [
        Route(f"{API}/healthz", healthz, methods=["GET"]),
        Route(f"{API}/readyz", readyz, methods=["GET"]),
        Route("/api/unauthed/auth-config", sessions.no_login, methods=["GET"]),
        Route(f"{API}/auth/apikey", sessions.no_login, methods=["POST"]),
        # SDKs fetch these without their API key; the signature in the query is checked instead.
        signed(SIGNED, checkpoints.download),
        signed(SIGNED_TRACE, session_search.download_trace),
    ]
    routes += openai.routes(application)
    routes += anthropic.routes(application)
    plain = {
        route.path: route.endpoint for route in routes if route.methods == {"POST"} and "{" not in route.path
    }
    starlette = Starlette(routes=routes, exception_handlers=cast(Mapping[Any, ExceptionHandler], handlers))
    return measured(_straight(plain, handlers, starlette), routes, tells, follows)


def _straight(
    endpoints: Mapping[str, Endpoint], handlers: Mapping[type[Exception], Answer], app: ASGIApp
) -> ASGIApp:
    """The application; a POST to one of these paths goes straight to its endpoint: what Starlette does around
    one costs more than the endpoint of a small request. What it raises is answered as there."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = endpoints.get(scope["path"]) if scope["method"] == "POST" else None
        if endpoint is None:
            await app(scope, receive, send)
            return
        scope["endpoint"] = endpoint
        request = Request(scope, receive, send)
        try:
            response = await endpoint(request)
        except Exception as error:
            kind = next(kind for kind in type(error).__mro__ if kind in handlers)
            refusal = await handlers[kind](request, error)
            await refusal(scope, receive, send)
            if kind is Exception:
                # The server logs it.
                raise
        else:
            await response(scope, receive, send)

    return answer


def _error(error: TinsmithError) -> Response:
    headers = {"retry-after": str(error.retry_after)} if error.retry_after else {}
    if error.code == REJECTED:
        # The SDK then exchanges its key for another token, and asks again.
        headers["www-authenticate"] = f'Bearer error="{REJECTED}"'
    return reply({"detail": error.message, "code": error.code}, error.http_status, headers)


async def _tinsmith_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TinsmithError)
    if error.http_status >= 500:
        _FAILED.failed(error.code, f"{request.method} {request.url.path}: {error.message}")
    return _error(error)


async def _redis_error(request: Request, error: Exception) -> Response:
    _REDIS_FAILED.failed(request.method, f"{request.url.path}: {error}")
    assert isinstance(error, RedisError)
    return _error(redis_errors.typed(error))


async def _gone(request: Request, error: Exception) -> Response:
    # Nobody reads it; it is no fault of ours either, which the server would log with a traceback.
    return Response(status_code=499)


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
        self,
        application: Application,
        host: str,
        port: int,
        limits: ConnectionLimits | None = None,
        tells: bool = False,
        tls: KeyFiles | None = None,
        proxies: Sequence[str] = (),
    ) -> None:
        """Binds the socket, so that `port` is known before serving starts; port 0 takes a free one.

        Args:
            tells: whether each request is a line of the access log.
            tls: certificate of the port, read again when it rotates; None: in the clear.
            proxies: addresses and networks whose X-Forwarded-For and X-Forwarded-Proto are believed.

        Raises:
            Unavailable: the address cannot be bound.
        """
        self._socket = _bind(host, port)
        self.port: int = self._socket.getsockname()[1]
        connections = Connections(limits or ConnectionLimits())
        config = uvicorn.Config(
            create_app(application, tells),
            proxy_headers=bool(proxies),
            forwarded_allow_ips=list(proxies),
            loop="none",
            # uvicorn calls it as it would call a class.
            http=cast(type[asyncio.Protocol], bounded(connections)),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=20,
        )
        handshakes = Handshakes(connections, https(tls)) if tls else None
        self._server = _Server(config, handshakes)
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
    """uvicorn, but signals are the process's business, and TLS begins in `handshakes`; None: in the clear."""

    def __init__(self, config: uvicorn.Config, handshakes: Handshakes | None = None) -> None:
        super().__init__(config)
        self._handshakes = handshakes

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        make = cast(Callable[..., asyncio.Protocol], self.config.http_protocol_class)
        options = {"config": self.config, "server_state": self.server_state, "app_state": {}}
        above: Callable[[], asyncio.Protocol] = functools.partial(make, **options)
        connection: Callable[[], asyncio.BaseProtocol] = above
        if self._handshakes is not None:
            connection = functools.partial(self._handshakes.before, above)
        loop = asyncio.get_running_loop()
        self.servers = [
            await loop.create_server(connection, sock=listener, backlog=self.config.backlog)
            for listener in sockets or ()
        ]
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        if self._handshakes is not None:
            self._handshakes.close()
        await super().shutdown(sockets)

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
