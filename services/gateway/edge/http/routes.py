"""The table of HTTP routes, and what every route shares: authentication and the request's parts.

Invariant: a route that is not in the table answers 404 with its path, and every route but
healthz and the signed downloads knows the caller before it reads the body.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import ExitStack, asynccontextmanager
from ipaddress import ip_address
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.common.contract.errors import InvalidRequest, TinsmithError
from services.gateway.access.body_budget import JSON_TIMES, Account, BodyBudget
from services.gateway.access.page_turns import LISTS
from services.gateway.application import Application
from services.gateway.audit.trail import Act
from services.gateway.edge.http.body import end_of, head_of, received
from services.gateway.edge.http.codec import head, messages
from services.gateway.edge.http.codec.results_out import JSON
from services.gateway.identity.key import Caller

T = TypeVar("T")

API = "/api/v1"


class Call(msgspec.Struct, frozen=True):
    """One authenticated HTTP request.

    Attributes:
        act: what is to be written down of it.
    """

    request: Request
    caller: Caller
    app: Application
    budget: BodyBudget
    act: Act

    @property
    def owner(self) -> str:
        """Of what the caller makes."""
        return self.caller.owner

    @property
    def address(self) -> str:
        """Where the call comes from."""
        return address_of(self.request)

    @property
    def from_this_machine(self) -> bool:
        """The client has the files of this machine: it connected over its loopback interface, which is not a
        container's."""
        if not self.app.near_clients:
            return False
        try:
            return ip_address(self.address).is_loopback
        except ValueError:
            return False

    def reached(self, path: str) -> str:
        """The URL of a path below the API. Any gateway can serve it, under the address that this client
        reached one by."""
        return f"{self.app.signed_urls.public_url or str(self.request.base_url).rstrip('/')}{API}/{path}"

    def check_query(self, *names: str) -> None:
        """Refuses parameters of the query other than these.

        Raises:
            InvalidRequest: there is another.
        """
        for name in self.request.query_params:
            if name not in names:
                known = ", ".join(names) or "no parameters"
                raise InvalidRequest(f"the query has {name[:50]!r}; {self.request.url.path} takes {known}")

    @asynccontextmanager
    async def body(self) -> AsyncIterator[bytes]:
        """The JSON body as bytes. Its memory counts until the context ends."""
        with self.budget.account(self.owner) as account:
            yield await self._body(account)

    async def _body(self, account: Account) -> bytes:
        data = await received(self.request, account, self.app.limits.json_body_bytes)
        account.hold(JSON_TIMES * len(data))
        return data

    async def computed(self, work: Callable[..., T], *args: object) -> T:
        """What work comes to in a thread, when it is this caller's turn."""
        return await self.app.turns.run(self.owner, work, *args)

    async def while_there(self, wait: Coroutine[Any, Any, T]) -> T:
        """What a wait comes to. It ends with its client: nobody else hears of it, and it counts as a call.

        Raises:
            ClientDisconnect: the client went away.
        """
        # The body is read, so the next thing to come from this client is that it went.
        leaving = asyncio.ensure_future(self.request.receive())
        there, waits = asyncio.timeout(None), True

        def gone(_: asyncio.Future[Any]) -> None:
            # It may go in the turn in which it is answered.
            if waits:
                there.reschedule(0.0)

        leaving.add_done_callback(gone)
        try:
            async with there:
                return await wait
        except TimeoutError:
            if not there.expired():
                raise
            raise ClientDisconnect from None
        finally:
            waits = False
            # It ends in the next turn of the loop; who waited is answered in this one.
            leaving.cancel()

    async def json(self, kind: type[T]) -> T:
        """The JSON body as a struct. Raises InvalidRequest or TooLarge."""
        async with self.read(kind) as body:
            return body

    @asynccontextmanager
    async def read(self, kind: type[T]) -> AsyncIterator[T]:
        """The same, for who waits with it: its memory counts until the context ends."""
        async with self.body() as data:
            body = messages.parse(kind, data)
            self.act.saw(lambda name: getattr(body, name, None))
            yield body


def address_of(request: Request) -> str:
    """Where a request comes from."""
    client = request.scope.get("client")
    return str(client[0]) if client else ""


Handler = Callable[[Call], Awaitable[Response]]
_MOST_ANSWER_BYTES = 2**16
_PIECE_BYTES = 2**18
_AT_ONCE_BYTES = 2**14


async def acted(
    app: Application, request: Request, method: str, caller: Caller, handler: Handler
) -> Response:
    """What a handler answers. What it did is written down, if it is something to be."""
    with app.audit.act(method, caller.owner, caller.key_id, address_of(request)) as act:
        act.saw(request.path_params.get)
        call = Call(request, caller, app, app.budget, act)
        if method in LISTS:
            async with app.page_turns.held(caller.owner):
                response = await handler(call)
        else:
            response = await handler(call)
        if act.counts and len(response.body) < _MOST_ANSWER_BYTES:
            act.saw(msgspec.json.decode(response.body, type=dict[str, Any]).get)
        return response


class Sent(Response):
    """A response that is handed to its connection piece by piece, as the client takes them."""

    def __init__(self, body: bytes, status: int, media_type: str | None, held: ExitStack) -> None:
        super().__init__(body, status, media_type=media_type)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held:
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            body = memoryview(self.body)
            in_pieces = len(body) if len(body) > _AT_ONCE_BYTES else 0
            for start in range(0, in_pieces, _PIECE_BYTES):
                piece = bytes(body[start : start + _PIECE_BYTES])
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            # After pieces it waits until they were taken; what is small is the system's at once.
            await send({"type": "http.response.body", "body": bytes(body[in_pieces:])})


def counted(app: Application, owner: str, response: Response) -> Response:
    """A response whose memory counts until its client has it, if it is large, as pages of lists may be.

    Raises:
        LimitReached: there is no room for it.
    """
    body = getattr(response, "body", b"")
    if isinstance(response, Sent) or len(body) <= _PIECE_BYTES:
        return response
    with ExitStack() as held:
        if not held.enter_context(app.answers.account(owner)).take_now(app.answers.of_result(len(body))):
            raise app.answers.refusal(owner)
        return Sent(bytes(body), response.status_code, response.media_type, held.pop_all())


N = TypeVar(
    "N",
    messages.OptimStep,
    messages.SaveWeights,
    messages.SaveWeightsForSampler,
    messages.SaveWeightsExternal,
    messages.LoadWeights,
)


def reply(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON response."""
    return Response(msgspec.json.encode(value), status, headers, media_type=JSON)


def promise(request_id: str, model_id: str) -> Response:
    """The reply to a request whose result is fetched with retrieve_future."""
    return reply({"request_id": request_id, "model_id": model_id})


async def numbered(call: Call, kind: type[N], accept: Callable[[N], Awaitable[Response]]) -> Response:
    """Runs `accept` on the body of a request that has a seq_id; one that cannot be read is `refused`."""
    try:
        body = await call.json(kind)
    except TinsmithError as error:
        return await refused(call, error, lambda beginning: head.in_json(beginning, end_of(call.request)))
    return await accept(body)


async def refused(
    call: Call, error: TinsmithError, place_in: Callable[[bytes], head.Place | None]
) -> Response:
    """The answer to a request that cannot be read. When its beginning or its end tells model and seq_id it is
    accepted as one that fails, because the client goes on with the next seq_id whatever the answer.

    Raises:
        TinsmithError: the error itself: the service is at fault, or nothing tells whose request it was.
    """
    place = place_in(await head_of(call.request)) if error.category == "user" else None
    if place is None:
        raise error
    request_id = await call.app.models.refuse(call.owner, place.model_id, place.seq_id, error)
    return promise(request_id, place.model_id)
