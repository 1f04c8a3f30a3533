"""The embedded Redis does what its options say."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
import redis

from services.launcher import machine, redis_server


@pytest.mark.parametrize("appendfsync", ["always", "everysec"])
def test_the_server_syncs_its_file_as_asked_and_keeps_to_its_memory(tmp_path: Path, appendfsync: str) -> None:
    process, url = redis_server.prepare(tmp_path, machine.free_port(), appendfsync, 700 << 20)
    server = subprocess.Popen(process.argv, stdout=subprocess.DEVNULL)
    try:
        with redis.Redis.from_url(url) as client:
            deadline = time.monotonic() + 10
            while True:
                try:
                    asked = {"appendfsync": appendfsync, "maxmemory": str(700 << 20)}
                    wanted = {**asked, "maxmemory-policy": "noeviction"}
                    assert client.config_get(*wanted) == wanted
                    return
                except redis.ConnectionError:
                    assert time.monotonic() < deadline
                    time.sleep(0.02)
    finally:
        server.terminate()
        server.wait(10)


def test_the_server_takes_a_quarter_of_the_memory_there_is() -> None:
    assert redis_server.memory_share(64 << 30) == 16 << 30
    assert redis_server.memory_share(1 << 30) == 512 << 20
