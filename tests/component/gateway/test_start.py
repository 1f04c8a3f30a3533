"""A gateway that starts, as a process of its own."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import redis.asyncio

from services.common.state import registry
from services.common.state.registry import ServiceRecord
from services.launcher.machine import free_port
from tests.component.gateway.process import launch
from tests.conftest import redis_server, redis_server_kinds


async def test_it_waits_for_redis_and_then_leaves_half_of_its_volume_to_others(tmp_path: Path) -> None:
    port = free_port()
    url = f"redis://localhost:{port}/0"
    gateway = launch(url, tmp_path, "gateway-0")
    try:
        # Longer than a command tries again by itself.
        with pytest.raises(subprocess.TimeoutExpired):
            gateway.process.wait(9)
        with redis_server(redis_server_kinds()["valkey"], tmp_path / "late", ["--port", str(port)]):
            gateway.wait_ready()
            async with redis.asyncio.Redis.from_url(url) as client:
                (found,) = await _announced(client)
            half = shutil.disk_usage(tmp_path).total // 2
            assert found.limits["--max-checkpoint-bytes"] == half
            gateway.process.terminate()
            gateway.process.wait(60)
    finally:
        gateway.process.kill()
        gateway.process.communicate(timeout=60)


def test_it_drains_when_it_is_asked_to_end_as_soon_as_it_can_be_reached(
    redis_url: str, tmp_path: Path
) -> None:
    gateway = launch(redis_url, tmp_path, "gateway-that-ends")
    try:
        deadline = time.monotonic() + 120
        while not _listens(gateway.port):
            assert gateway.process.poll() is None and time.monotonic() < deadline, "it never listened"
        gateway.process.terminate()
        assert gateway.process.wait(60) == 0
    finally:
        gateway.process.kill()
        gateway.process.communicate(timeout=60)


async def test_it_starts_again_while_redis_has_no_memory_left(
    redis_client: redis.asyncio.Redis, redis_url: str, tmp_path: Path
) -> None:
    await redis_client.flushall()
    configured = '[{"name": "org/model"}]'

    def ends_when_asked() -> None:
        gateway = launch(redis_url, tmp_path, "gateway-again", "--base-models", configured)
        try:
            gateway.wait_ready()
            gateway.process.terminate()
            assert gateway.process.wait(60) == 0
        finally:
            gateway.process.kill()
            gateway.process.communicate(timeout=60)

    await asyncio.to_thread(ends_when_asked)
    await redis_client.config_set("maxmemory", 1)
    try:
        await asyncio.to_thread(ends_when_asked)
    finally:
        await redis_client.config_set("maxmemory", 0)


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


async def _announced(client: redis.asyncio.Redis) -> Sequence[ServiceRecord]:
    """The gateways, once there is one: it answers over HTTP a moment before it announces itself."""
    async with asyncio.timeout(120):
        while not (found := await registry.live(client, "gateway")):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return found
