"""Sentinels replace a real Redis server, and its clients go on with the next one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis
import redis.asyncio

from services.common.state import redis_client
from services.common.state.scripts import Script
from tests.component.gateway.process import launch, wait_until
from tests.component.gateway.sentinels import Watched, watched_servers


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    with watched_servers(tmp_path) as found:
        yield found


@pytest.fixture
async def client(watched: Watched) -> AsyncIterator[redis.asyncio.Redis]:
    async with redis_client.connect(watched.url) as found:
        yield found


async def within(seconds: float, done) -> int:
    """Tries until it succeeds; how often Redis could not be reached before."""
    failed = 0
    async with asyncio.timeout(seconds):
        while True:
            try:
                await done()
                return failed
            except redis.ConnectionError:
                failed += 1
                await asyncio.sleep(0.1)


async def test_clients_find_the_primary_and_after_its_death_the_next_one(
    watched: Watched, client: redis.asyncio.Redis
) -> None:
    first = watched.primary()
    blocking = redis_client.connect_sync(watched.url)
    script = Script(client, "raise_version")
    assert await client.set("before", 1)
    assert await script(["version"], 1)
    assert await asyncio.to_thread(blocking.ping)
    watched.wait_in_step()

    watched.kill_primary()

    await within(120, lambda: client.set("after", 1))
    assert await script(["version"], 2)
    assert await asyncio.to_thread(blocking.set, "blocking", 1)
    second = watched.primary()
    assert second != first
    with watched.client(second) as found:
        assert sorted(found.keys()) == [b"after", b"before", b"blocking", b"version"]
    blocking.close()


async def test_connections_to_a_primary_that_was_demoted_move_to_the_new_one(
    watched: Watched, client: redis.asyncio.Redis
) -> None:
    first = watched.primary()
    await asyncio.gather(*(client.ping() for _ in range(8)))
    assert await client.set("before", 1)
    watched.wait_in_step()

    watched.begin_failover()
    wait_until(lambda: watched.primary() != first)
    # The one before still runs, and answers READONLY to what its open connections bring.
    with watched.client(first) as demoted:
        wait_until(lambda: demoted.info("replication")["role"] == "slave")

    await within(120, lambda: client.set("after", 1))
    with watched.client(watched.primary()) as found:
        assert sorted(found.keys()) == [b"after", b"before"]


async def test_a_gateway_goes_on_after_a_failover(watched: Watched, tmp_path: Path) -> None:
    gateway = launch(watched.url, tmp_path, "gateway-0").wait_ready()
    try:
        async with gateway.client() as client:
            session = {"tags": [], "sdk_version": "0.38.0"}
            answer = await client.post("create_session", json=session)
            beat = {"session_id": answer.json()["session_id"]}
            watched.wait_in_step()
            watched.kill_primary()

            async def accepted() -> None:
                for path, body in (("create_session", session), ("session_heartbeat", beat)):
                    answer = await client.post(path, json=body)
                    # What fails meanwhile is one that the SDK repeats.
                    assert answer.status_code in (200, 503), answer.text
                    if answer.status_code == 503:
                        raise redis.ConnectionError(answer.text)

            await within(120, accepted)
            assert gateway.process.poll() is None
    finally:
        gateway.process.terminate()
        gateway.process.communicate(timeout=60)
