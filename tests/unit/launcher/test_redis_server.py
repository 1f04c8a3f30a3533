"""The embedded Redis does what its options say."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
import redis

from services.launcher import machine, redis_server


@pytest.mark.parametrize("appendfsync", ["always", "everysec"])
def test_the_server_syncs_its_file_as_asked(tmp_path: Path, appendfsync: str) -> None:
    process, url = redis_server.prepare(tmp_path, machine.free_port(), appendfsync)
    server = subprocess.Popen(process.argv, stdout=subprocess.DEVNULL)
    try:
        with redis.Redis.from_url(url) as client:
            deadline = time.monotonic() + 10
            while True:
                try:
                    assert client.config_get("appendfsync") == {"appendfsync": appendfsync}
                    return
                except redis.ConnectionError:
                    assert time.monotonic() < deadline
                    time.sleep(0.02)
    finally:
        server.terminate()
        server.wait(10)
