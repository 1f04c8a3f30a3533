"""A TCP proxy that misbehaves on command: delays, resets, half-open connections, black holes.

Any number of routes (listening address -> target) share one `Wire`, and so one kind of trouble. All of it
runs in the event loop of one thread; the methods may be called from any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Coroutine
from typing import Any

Address = tuple[str, int]

_CHUNK = 1 << 16
_POLL_S = 0.02
_RESET = struct.pack("ii", 1, 0)


class Wire:
    """The connections between two kinds of processes.

    Attributes:
        delay: seconds that every chunk of bytes waits, in both directions.
        to_server: whether bytes go through towards the server; `to_client`: towards the client. A new
            connection is accepted in any case, and reaches the server once bytes go there.
    """

    def __init__(self) -> None:
        self.delay = 0.0
        self.to_server = True
        self.to_client = True
        self._loop = asyncio.new_event_loop()
        self._writers: set[asyncio.StreamWriter] = set()
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="wire", daemon=True)
        self._thread.start()

    def route(self, listen: Address, target: Address) -> int:
        """Listens on an address (port 0 takes a free one) for a target; the port."""

        async def start() -> int:
            async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                task = asyncio.current_task()
                assert task is not None
                self._tasks.add(task)
                try:
                    await self._connection(reader, writer, target)
                finally:
                    self._tasks.discard(task)

            server = await asyncio.start_server(serve, *listen)
            self._servers.append(server)
            return int(server.sockets[0].getsockname()[1])

        return self._run(start())

    def reset(self) -> None:
        """Cuts every connection: both ends get a reset."""

        async def cut() -> None:
            for writer in list(self._writers):
                with contextlib.suppress(OSError):
                    sock = writer.get_extra_info("socket")
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                writer.transport.abort()

        self._run(cut())

    def mend(self) -> None:
        """No trouble for what comes; connections that were in trouble are cut."""
        self.delay, self.to_server, self.to_client = 0.0, True, True

    def close(self) -> None:
        async def end() -> None:
            for server in self._servers:
                server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

        self._run(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: Address
    ) -> None:
        self._writers.add(writer)
        server_writer: asyncio.StreamWriter | None = None
        try:
            await self._until_open("to_server")
            server_reader, server_writer = await asyncio.open_connection(*target)
            self._writers.add(server_writer)
            await asyncio.gather(
                self._pump(reader, server_writer, "to_server"), self._pump(server_reader, writer, "to_client")
            )
        except OSError:
            pass
        finally:
            for end in (writer, server_writer):
                if end is not None:
                    self._writers.discard(end)
                    end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: str) -> None:
        while data := await reader.read(_CHUNK):
            if self.delay:
                await asyncio.sleep(self.delay)
            await self._until_open(direction)
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()

    async def _until_open(self, direction: str) -> None:
        while not getattr(self, direction):  # noqa: ASYNC110 - set from other threads
            await asyncio.sleep(_POLL_S)
