"""Connections to Redis survive what happens to them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
import redis.asyncio
import uvloop

from services.common.process.tasks import cancel_all
from services.common.state import redis_client
from services.common.state.scripts import Script
from services.gateway.cluster.redis_restart import RedoLog
from tests.cluster.conftest import free_port
from tests.conftest import redis_server, redis_server_kinds
from tests.robustness.proxy import Wire
from tests.robustness.redis_process import RedisProcess


def test_idle_connections_that_were_reset_are_made_anew_under_the_loop_of_the_services(
    tmp_path: Path,
) -> None:
    server, wire = RedisProcess(tmp_path, free_port()), Wire()
    port = wire.route(("127.0.0.1", 0), ("127.0.0.1", server.port))

    async def use() -> None:
        client = redis_client.connect(server.url_through(port))
        try:
            for _ in range(3):
                assert all(await asyncio.gather(*(client.ping() for _ in range(8))))
                await asyncio.to_thread(wire.reset)
                await asyncio.sleep(0.05)
        finally:
            await client.aclose()

    try:
        uvloop.run(use())
    finally:
        wire.close()
        server.close()


async def test_a_process_that_starts_before_redis_waits_for_it(tmp_path: Path) -> None:
    port = free_port()
    client = redis_client.connect(f"redis://localhost:{port}")
    waits = asyncio.create_task(redis_client.until_there(client))
    try:
        # Longer than a command tries again by itself.
        assert not (await asyncio.wait([waits], timeout=7))[0]
        options = ["--port", str(port)]
        with redis_server(redis_server_kinds()["valkey"], tmp_path / "late", options):
            await asyncio.wait_for(waits, 60)
            assert await client.ping()
    finally:
        await cancel_all([waits])
        await client.aclose()


async def test_a_redis_that_never_comes_or_lets_nobody_in_is_not_waited_for_for_ever() -> None:
    client = redis_client.connect(f"redis://localhost:{free_port()}")
    with pytest.raises(redis.ConnectionError):
        await redis_client.until_there(client, 0.1)
    await client.aclose()


class Address:
    """Where Redis is reached: new connections go to the server that it leads to by then."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self, path: Path) -> str:
        self._server = await asyncio.start_unix_server(self._serve, path)
        return f"unix://{path}"

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        await cancel_all(self._tasks)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_unix_connection(self.target)
        for source, sink in ((reader, back), (there, writer)):
            task = asyncio.create_task(self._pump(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while chunk := await source.read(1 << 16):
                sink.write(chunk)
            sink.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """URLs of a primary, and of a replica of it."""
    executable = redis_server_kinds()["valkey"]
    port = free_port()
    with (
        redis_server(executable, tmp_path / "a", ["--port", str(port)]) as first,
        redis_server(executable, tmp_path / "b", ["--replicaof", f"127.0.0.1 {port}"]) as second,
    ):
        yield first, second


async def test_a_primary_that_was_demoted_is_left_for_the_new_one(
    pair: tuple[str, str], tmp_path: Path
) -> None:
    first, second = pair
    address = Address(Path(first.removeprefix("unix://")))
    url = await address.listen(tmp_path / "address.sock")
    clients = redis_client.connect(url), redis_client.connect_sync(url)
    client, blocking = clients
    redo_log = RedoLog(client)
    script = Script(client, "raise_version")
    try:
        assert await client.set("before", 1)
        assert await script(["version"], 1)
        await asyncio.gather(*(client.ping() for _ in range(8)))
        assert await asyncio.to_thread(blocking.set, "before", 2)
        await redo_log.start()
        # Its connections stay open.
        async with redis_client.connect(second) as promoted, redis_client.connect(first) as demoted:
            await promoted.replicaof("NO", "ONE")
            await demoted.replicaof("127.0.0.1", "1")
            with pytest.raises(redis.ConnectionError, match="takes no writes"):
                await client.set("after", 1)
            with pytest.raises(redis.ConnectionError, match="takes no writes"):
                await asyncio.to_thread(blocking.set, "after", 1)
            address.target = Path(second.removeprefix("unix://"))
            async with asyncio.timeout(60):
                assert await client.set("after", 2)
                assert await script(["version"], 2)
                pipeline = client.pipeline(transaction=False)
                for number in range(3):
                    pipeline.set(f"piped-{number}", 1)
                assert await pipeline.execute() == [True] * 3
                assert await asyncio.to_thread(blocking.set, "after", 3)
            assert await promoted.get("after") == b"3"
    finally:
        await redo_log.stop()
        await client.aclose()
        blocking.close()
        await address.close()


async def test_who_is_cancelled_at_any_moment_of_a_command_stays_so(any_redis: redis.asyncio.Redis) -> None:
    async def asks() -> None:
        await any_redis.ping()
        await asyncio.Event().wait()

    # A connection that is there already, as always but once.
    await any_redis.ping()
    for turns in range(40):
        asking = asyncio.create_task(asks())
        for _ in range(turns):
            await asyncio.sleep(0)
        asking.cancel()
        done, _ = await asyncio.wait([asking], timeout=5)
        assert done, f"cancelled after {turns} turns of the loop"
        assert asking.cancelled()
    assert await any_redis.ping()
