"""Connections to Redis survive what happens to them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import uvloop

from services.common.state import redis_client
from tests.cluster.conftest import free_port
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
