"""What a gRPC server takes of its peers.

Invariant: what a handler holds for a stream it holds for a bounded time after its client stopped reading, on
a port that anybody may reach. gRPC itself keeps the message that is on its way until the client reads or its
connection ends; one call of a connection cannot be reset.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import grpc.aio

from services.common.contract.errors import DeadlineExceeded

MAX_MESSAGE_BYTES = 256 * 1024 * 1024
_HANDSHAKE_MS = 10_000


@dataclass(frozen=True)
class ServerLimits:
    """What a server takes of its peers. The defaults are those among services of one cluster.

    Attributes:
        message_bytes: largest message that is received.
        metadata_bytes: largest header block of a call. (gRPC refuses some of it from half of that on.)
        streams: calls that one connection has at once; further ones wait at the client.
        connections: connections at once; further ones are closed.
        waiting: calls of all connections that nobody has looked at yet; further ones are cancelled.
        idle_s: how long a connection without calls is kept; 0: for ever. Clients connect anew by themselves.
        age_s: how long new calls are taken on one connection; 0: for ever. Those under way end on it. Clients
            resolve its name again, and so see servers that came since.
        ahead_bytes: of a call that come before anybody asked for them; a message comes at so much a round
            trip. 0: what the connection carries, up to 16 MiB, which any caller can have gRPC keep.
        write_s: how long a stream waits for its client to read; 0: for ever.
    """

    message_bytes: int = MAX_MESSAGE_BYTES
    metadata_bytes: int = 16 * 1024
    streams: int = 100_000
    connections: int = 100_000
    waiting: int = 100_000
    idle_s: int = 0
    age_s: int = 0
    ahead_bytes: int = 0
    write_s: float = 0.0

    @classmethod
    def public(cls, message_bytes: int, connections: int, calls: int) -> ServerLimits:
        """For a port that anybody may reach, which takes so many calls at once. A client waits for many
        results at once, each in a call."""
        kept = cls(message_bytes, 8 * 1024, 1024, connections, calls, ahead_bytes=2**20)
        return replace(kept, idle_s=120, age_s=600, write_s=600)

    def options(self) -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = [
            ("grpc.max_receive_message_length", self.message_bytes),
            ("grpc.max_metadata_size", self.metadata_bytes // 2),
            ("grpc.absolute_max_metadata_size", self.metadata_bytes),
            ("grpc.max_concurrent_streams", self.streams),
            ("grpc.max_allowed_incoming_connections", self.connections),
            # gRPC would cancel some from 1,000 on, by chance.
            ("grpc.server.max_pending_requests", self.waiting),
            ("grpc.server.max_pending_requests_hard_limit", self.waiting),
            # Any number of pings is answered, which costs next to nothing. A connection that gRPC closes for
            # too many of them stays open, unread, for as long as its peer sends more.
            ("grpc.http2.max_ping_strikes", 0),
            # A connection that does not begin to speak HTTP/2 is closed.
            ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
            ("grpc.http2.settings_timeout", _HANDSHAKE_MS),
        ]
        if self.ahead_bytes:
            found += [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", self.ahead_bytes)]
        if self.idle_s:
            found.append(("grpc.max_connection_idle_ms", self.idle_s * 1000))
        if self.age_s:
            found.append(("grpc.max_connection_age_ms", self.age_s * 1000))
        return found


async def write(context: grpc.aio.ServicerContext, reply: Any, seconds: float) -> None:
    """Sends a message of a stream, as soon as its client has read what came before.

    Args:
        seconds: for so long it may have read nothing; 0 = without end.

    Raises:
        DeadlineExceeded: it has not.
        CancelledError: the client has gone, which gRPC may tell here before it cancels the call.
    """
    try:
        async with asyncio.timeout(seconds or None):
            await context.write(reply)
    except grpc.aio.InternalError as gone:
        raise asyncio.CancelledError from gone
    except TimeoutError as error:
        raise DeadlineExceeded(
            f"nothing of the stream was read for {seconds:g} s; make the call again, and read what it tells"
        ) from error
