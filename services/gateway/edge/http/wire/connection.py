"""What one HTTP connection may cost before anybody knows whose it is.

Invariants: a connection is either busy with a request whose head is in, or it has a deadline; and there are
at most so many connections, those included whose TLS handshake has not ended (`handshake`), of which one that
only waits gives way to a new one. The head of a request is
bounded in bytes and fields, and so are requests that are sent ahead of answers. A client that does not take
its answer is cut off. Who answers a request is asked when its head is in, and a small body for which it waits
no longer than a second.

uvicorn bounds none of this with httptools; its other parser, h11, bounds the head's bytes only and takes
several times the CPU. So this is its protocol for httptools with bounds, and not a parser of our own. Its own
limit of connections is not used: it answers 503, which the SDK repeats at once, and it prefers those who hold
a connection open to those who need one.
"""

from __future__ import annotations

import asyncio
from asyncio.events import TimerHandle
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol
from urllib.parse import unquote

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from services.common.contract.errors import HeadTooLarge, InvalidRequest, Overloaded, TinsmithError
from services.gateway.edge.http.wire.cycle import Cycle
from services.gateway.edge.http.wire.fields import declares_at_most, field_of


@dataclass(frozen=True)
class ConnectionLimits:
    """Bounds of HTTP connections.

    Attributes:
        connections: at once, in this process; more than one API key may hold calls (half of all).
        head_bytes: URL and header fields of one request.
        head_fields: header fields of one request.
        head_seconds: time for them, from the connection or the request's first byte on.
        pipelined: requests that are received before earlier ones of their connection are answered.
        idle_seconds: how long a connection without a request is kept.
        linger_seconds: how long a body is received that nobody reads any more, because it was refused. A
            client that still sends it would else not see why.
        stuck_seconds: how long a client may take nothing of an answer.
    """

    connections: int = 5120
    head_bytes: int = 32 * 1024
    head_fields: int = 100
    head_seconds: float = 10.0
    pipelined: int = 8
    idle_seconds: int = 75
    linger_seconds: float = 10.0
    stuck_seconds: float = 60.0


WHOLE_BODY = "tinsmith.whole_body"
"""Is in the scope of a request once all of its body is here: the next message is there at once, and has what
is left of it."""


_TICK_S = 0.001
"""uvloop counts milliseconds, so a timer may end so much too soon."""
_LITTLE_BYTES = 16 * 1024
_BODY_S = 1.0
"""A body of no more bytes is waited for so long before anybody looks at its request."""


class Held(Protocol):
    """What counts as a connection."""

    def cut(self) -> None:
        """Ends it now, whatever is unsent."""


class Connections:
    """The connections of one server, those that only wait in the order since when."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._all: set[Held] = set()
        self._waiting: dict[Held, None] = {}

    def __len__(self) -> int:
        return len(self._all)

    def admit(self, connection: Held) -> bool:
        """Counts a new connection, at the expense of the one that has waited longest if need be; False when
        all are busy."""
        if len(self._all) >= self.limits.connections:
            oldest = next(iter(self._waiting), None)
            if oldest is None:
                return False
            self.forget(oldest)
            oldest.cut()
        self._all.add(connection)
        return True

    def note_waiting(self, connection: Held) -> None:
        if connection in self._all:
            self._waiting.pop(connection, None)
            self._waiting[connection] = None

    def note_busy(self, connection: Held) -> None:
        self._waiting.pop(connection, None)

    def forget(self, connection: Held) -> None:
        self._all.discard(connection)
        self._waiting.pop(connection, None)


class Connection(HttpToolsProtocol):
    """uvicorn's protocol for httptools, with bounds."""

    def __init__(self, *args: Any, connections: Connections, **options: Any) -> None:
        super().__init__(*args, **options)
        self._known = connections
        self._limits = connections.limits
        self._deadline: TimerHandle | None = None
        self._until: float | None = None
        self._awaited: tuple[RequestResponseCycle, Any] | None = None
        self._late: TimerHandle | None = None
        self._stuck: TimerHandle | None = None
        self._unsent = 0
        self._in_head = self._head_is_new = False
        # What the parser may keep to itself: bytes in which nothing came to an end.
        self._unfinished = self._fed = 0
        self._is_more = self._began_beside = False
        self._trailers: list[tuple[bytes, bytes]] = []
        self._receiving = False
        self._refusal: TinsmithError | None = None

    def cut(self) -> None:
        """Ends the connection now, whatever is unsent."""
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._known.admit(self):
            self._wait(self._limits.head_seconds)
        else:
            self._refuse(Overloaded("this gateway has all the connections it takes; try again in a second"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._known.forget(self)
        self._until = None
        self._cancel_deadline()
        self._cancel_stuck()
        super().connection_lost(exc)
        self._start_awaited()

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        self._fed, self._is_more = len(data), False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # Nothing is upgraded here: the request is served as it is.
            self._start_awaited()
            return
        except httptools.HttpParserError:
            self._refuse(self._refusal or InvalidRequest("this is not an HTTP request"))
            return
        self._trailers.clear()
        self._bound_wait_for_body()
        if self._in_head and self._head_is_new:
            # Most come as a whole, and are waited for by nobody.
            self._head_is_new = False
            self._wait(self._limits.head_seconds)
        if self._receiving:
            # The parser keeps a field to itself until it is whole, also one that comes after a body.
            self._unfinished = 0 if self._is_more else self._unfinished + len(data)
            if self._unfinished > self._limits.head_bytes or len(self.headers) > self._limits.head_fields:
                self._refuse(self._too_large())

    def on_message_begin(self) -> None:
        self._in_head = self._receiving = True
        self._unfinished, self._began_beside = 0, self._is_more
        self._head_is_new = self.cycle is None or self.cycle.response_complete
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        # Twenty times a request: what else is to be done for each is done for all of them at their end.
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._is_too_large():
            self._fail(self._too_large())
        self.headers[:] = [(name.lower(), value) for name, value in self.headers]
        # What may come after the body is of no use to anybody.
        self.headers = self._trailers
        most = self._limits.pipelined
        if len(self.pipeline) >= most:
            self._fail(InvalidRequest(f"more than {most} requests were sent ahead of their answers"))
        self._in_head = False
        self._until = None
        self._known.note_busy(self)
        self._complete_scope()
        before = self.cycle
        self.cycle = self._cycle()
        if before is None or before.response_complete:
            self._start_asgi_task(self.cycle, self.app)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))

    def _is_too_large(self) -> bool:
        limits = self._limits
        if len(self.headers) > limits.head_fields:
            return True
        # Nearly all came in few pieces, which were no larger.
        return (self._began_beside or self._unfinished + self._fed > limits.head_bytes) and (
            len(self.url) + sum(map(len, chain.from_iterable(self.headers))) > limits.head_bytes
        )

    def _complete_scope(self) -> None:
        """What the head says, as uvicorn tells it; but there are no protocols to upgrade to."""
        scope, url = self.scope, httptools.parse_url(self.url)
        scope["method"] = self.parser.get_method().decode("ascii")
        scope["http_version"] = self.parser.get_http_version()
        path = url.path.decode("ascii")
        scope["path"] = self.root_path + (unquote(path) if "%" in path else path)
        scope["raw_path"] = self.root_path.encode("ascii") + url.path
        scope["query_string"] = url.query or b""

    def _cycle(self) -> Cycle:
        scope: Any = self.scope
        expected = field_of(scope, b"expect") or ""
        return Cycle(
            scope=scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=expected.lower() == "100-continue",
            keep_alive=self.scope["http_version"] != "1.0" and self.parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )

    def on_body(self, body: bytes) -> None:
        self._is_more = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._receiving, self._is_more = False, True
        self.scope[WHOLE_BODY] = True  # type: ignore[literal-required]
        if self.cycle.response_complete:
            # What was left of a refused body is in: the connection can be used again.
            self._wait(self._limits.idle_seconds)
        super().on_message_complete()
        self._start_awaited()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Begins to answer a request; one that has a small body when that is in, or does not come for a
        while. Clients send it right after the head, but in a piece of its own, and to be waited for by who
        answers it costs as much as the rest of the edge."""
        if (
            cycle.more_body
            and not cycle.waiting_for_100_continue
            and declares_at_most(_LITTLE_BYTES, cycle.scope)
        ):
            self._awaited = cycle, app
        else:
            super()._start_asgi_task(cycle, app)

    def _start_awaited(self) -> None:
        if self._awaited is not None:
            cycle, app = self._awaited
            self._awaited = None
            if self._late is not None:
                self._late.cancel()
                self._late = None
            super()._start_asgi_task(cycle, app)

    def _bound_wait_for_body(self) -> None:
        if self._awaited is not None and self._late is None:
            self._late = self.loop.call_later(_BODY_S, self._start_awaited)

    def on_response_complete(self) -> None:
        """As uvicorn does it, but that only this class bounds how long a connection waits."""
        self.server_state.total_requests += 1
        closing = self.transport.is_closing()
        if not closing:
            self.flow.resume_reading()
            if self.pipeline:
                self._start_asgi_task(*self.pipeline.pop())
        self._bound_wait_for_body()
        if closing or (self._receiving and self.cycle.response_complete):
            self._wait(self._limits.linger_seconds)
        elif self.cycle.response_complete:
            self._wait(self._limits.idle_seconds)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._cancel_stuck()
        self._look_again(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._cancel_stuck()
        super().resume_writing()

    def _look_again(self, unsent: int) -> None:
        """Cuts the connection if after a while there is not less to be sent than this."""

        def look() -> None:
            left = self.transport.get_write_buffer_size()
            if left >= unsent:
                self.cut()
            else:
                self._look_again(left)

        self._stuck = self.loop.call_later(self._limits.stuck_seconds, look)

    def _too_large(self) -> TinsmithError:
        limits = self._limits
        return HeadTooLarge(
            f"the URL and the headers have more than {limits.head_bytes} bytes or {limits.head_fields} fields"
        )

    def _fail(self, error: TinsmithError) -> None:
        """Ends parsing from within a callback of the parser."""
        self._refusal = error
        raise error

    def _refuse(self, error: TinsmithError) -> None:
        """Answers what cannot be read as a request, and ends the connection."""
        # The frames that it was raised through hold this connection, and what was read last: with them both
        # would stay until the collector comes.
        self._refusal = error.with_traceback(None)
        body = msgspec.json.encode({"detail": error.message, "code": error.code})
        head = [
            STATUS_LINE[error.http_status],
            b"content-type: application/json\r\n",
            b"content-length: %d\r\n" % len(body),
            b"retry-after: 1\r\n" if error.http_status == Overloaded.http_status else b"",
            b"connection: close\r\n\r\n",
        ]
        answered = self._receiving and not self._in_head
        if self.cycle is None or (self.cycle.response_complete and not answered):
            self.transport.write(b"".join([*head, body]))
        self.transport.close()
        self._wait(self._limits.linger_seconds)

    def _wait(self, seconds: float) -> None:
        """From now on the connection only waits, and not for longer than this."""
        self._known.note_waiting(self)
        self._unsent = 0
        self._look_at(self.loop.time() + seconds)

    def _look_at(self, until: float) -> None:
        """Has `_expire` called then. A timer that runs and ends sooner stays: it looks how long is left, and
        costs a connection less that waits again and again, as between any two requests."""
        self._until = until
        if self._deadline is None or self._deadline.when() > until:
            self._cancel_deadline()
            self._deadline = self.loop.call_at(until, self._expire)

    def _expire(self) -> None:
        self._deadline = None
        if self._until is None:
            return
        if self._until - self.loop.time() > _TICK_S:
            self._look_at(self._until)
            return
        unsent = self.transport.get_write_buffer_size()
        if unsent and (not self._unsent or unsent < self._unsent):
            # The last answer is still being taken.
            self._unsent = unsent
            self._look_at(self.loop.time() + self._limits.stuck_seconds)
        elif unsent or self.transport.is_closing():
            self.cut()
        else:
            self.transport.close()

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _cancel_stuck(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None


def bounded(connections: Connections) -> Callable[..., Connection]:
    """What uvicorn makes a connection with."""

    def make(*args: Any, **options: Any) -> Connection:
        return Connection(*args, connections=connections, **options)

    return make
