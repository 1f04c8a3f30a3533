"""A connection and its encryption.

Invariants: it counts among the connections from its first moment on, as one that waits, so it gives way to
others; its handshake has a deadline; no byte of the client is lost, however early it comes; and what is
kept of a client that nobody knows yet is bounded by `_RECORD`.

asyncio's own servers of TLS make a connection known when its handshake has ended. Before that nobody counts
it, and whoever sends nothing has as many as there are files for the process. So TLS lies here over the plain
connection from the start. It is asyncio's: uvloop can only put its own on a connection that stands already,
and then loses what a client sent together with it.
"""

from __future__ import annotations

import asyncio
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from typing import Any, cast

from services.gateway.edge.http.wire.connection import Connections

_RECORD = 16 * 1024
"""Bytes that are read at a time: the most that one record of TLS carries. asyncio reads, and reserves for
each connection, 256 KiB."""
_AHEAD = 64 * 1024
"""Bytes that wait encrypted, in each direction, before the other side has to."""


class Handshakes:
    """Those of one server."""

    def __init__(self, connections: Connections, tls: ssl.SSLContext) -> None:
        self.connections = connections
        self.tls = tls
        self.running: set[_Wire] = set()

    def before(self, make: Callable[[], asyncio.Protocol]) -> asyncio.BaseProtocol:
        """The protocol of a new connection, which another one is put upon when it is encrypted."""
        return _Wire(self, make)

    def note_begun(self, wire: _Wire) -> None:
        self.running.add(wire)
        self.connections.note_waiting(wire)

    def note_ended(self, wire: _Wire) -> None:
        self.running.discard(wire)
        self.connections.forget(wire)

    def close(self) -> None:
        """Ends those that run."""
        for wire in list(self.running):
            wire.cut()


class _Wire(SSLProtocol):
    """TLS over a plain connection. It counts as a connection until its handshake has ended; from then on what
    lies upon it does."""

    max_size = _RECORD

    def __init__(self, all_of_them: Handshakes, make: Callable[[], asyncio.Protocol]) -> None:
        self._all = all_of_them
        self._plain: asyncio.Transport | None = None
        limits = all_of_them.connections.limits
        super().__init__(
            asyncio.get_running_loop(),
            _Above(self, make),
            all_of_them.tls,
            cast(Any, None),
            server_side=True,
            # Seconds of any kind, which its stubs do not say.
            ssl_handshake_timeout=cast(Any, limits.head_seconds),
            ssl_shutdown_timeout=cast(Any, limits.stuck_seconds),
        )

    def cut(self) -> None:
        if self._plain is not None:
            self._plain.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._plain = plain = cast(asyncio.Transport, transport)
        if not self._all.connections.admit(self):
            # Nobody could read why before the handshake.
            plain.abort()
            return
        self._all.note_begun(self)
        super().connection_made(plain)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._all.note_ended(self)
        super().connection_lost(exc)
        # Each holds the other, and a buffer.
        self._plain = None

    def begun(self, encrypted: asyncio.Transport, protocol: asyncio.Protocol) -> None:
        """The handshake has ended: a protocol goes on."""
        assert self._plain is not None
        self._all.note_ended(self)
        encrypted.set_protocol(protocol)
        encrypted.set_write_buffer_limits(high=_AHEAD)
        cast(Any, encrypted).set_read_buffer_limits(high=_AHEAD)
        protocol.connection_made(_Encrypted(encrypted, self._plain))


class _Above(asyncio.Protocol):
    """What lies upon the encryption until the handshake has ended."""

    def __init__(self, wire: _Wire, make: Callable[[], asyncio.Protocol]) -> None:
        self._wire = wire
        self._make = make

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._wire.begun(cast(asyncio.Transport, transport), self._make())


class _Encrypted(asyncio.Transport):
    """What is sent and received encrypted. asyncio's transport may be closed only once, else it can neither
    be asked nor cut any more; and of what is unsent it does not count what is encrypted."""

    def __init__(self, encrypted: asyncio.Transport, plain: asyncio.Transport) -> None:
        super().__init__()
        self._encrypted = encrypted
        self._plain = plain

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._encrypted.get_extra_info(name, default)

    def is_closing(self) -> bool:
        return self._encrypted.is_closing()

    def close(self) -> None:
        if not self._encrypted.is_closing():
            self._encrypted.close()

    def abort(self) -> None:
        self._encrypted.abort()

    def pause_reading(self) -> None:
        self._encrypted.pause_reading()

    def resume_reading(self) -> None:
        self._encrypted.resume_reading()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._encrypted.write(data)

    def get_write_buffer_size(self) -> int:
        return self._encrypted.get_write_buffer_size() + self._plain.get_write_buffer_size()
