"""Trainers and samplers, as processes, whose model is on a hub: one that is away, or does not have it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from services.common.process.process import REFUSED
from services.launcher.machine import free_port
from services.trainer.world.launch import launch_command
from tests.announced import find
from tests.component.own_redis import started_redis
from tests.component.sampler.process import make_model
from tests.model_hub import Hub, served

NAME = "org/model"
COMMANDS: dict[str, Callable[[list[str]], list[str]]] = {
    "trainer": lambda args: launch_command(1, [*args, "--device", "cpu"]),
    "sampler": lambda args: [sys.executable, "-m", "services.sampler", *args],
}
PATIENCE_S = 420.0


own_redis = pytest.fixture(started_redis, scope="module", name="own_redis")


@dataclass
class Service:
    """A process that serves NAME from a hub on a port of this machine, and its log."""

    kind: str
    redis_url: str
    log: Path
    process: subprocess.Popen[bytes]

    def wait_until(self, what: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not what():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)

    def wait_until_it_says(self, sentence: str) -> None:
        self.wait_until(lambda: sentence in self.log.read_text())

    def wait_until_it_serves(self) -> None:
        with redis.Redis.from_url(self.redis_url, socket_timeout=30) as client:
            self.wait_until(lambda: find(client, self.kind, f"{self.kind}-0"))
            record = find(client, self.kind, f"{self.kind}-0")
        # For whoever asks it is the hub's model, wherever its files are.
        assert record is not None and record.model_path == NAME

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(120)


@contextmanager
def started(kind: str, redis_url: str, directory: Path, port: int) -> Iterator[Service]:
    flags = ["--id", f"{kind}-0", "--model", f"org/name={NAME}", "--data-dir", str(directory / "data")]
    hub = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HUB_CACHE": str(directory / "cache")}
    environment = {**os.environ, **hub, "TINSMITH_REDIS_URL": redis_url, "HF_HUB_OFFLINE": "0"}
    log = directory / f"{kind}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            COMMANDS[kind]([*flags, "--port", "0"]), env=environment, stdout=output, stderr=output
        )
    try:
        yield Service(kind, redis_url, log, process)
    finally:
        process.kill()
        process.wait()


@pytest.mark.heavy
@pytest.mark.parametrize("kind", COMMANDS)
def test_a_hub_that_is_away_is_waited_for_and_asked_once(kind: str, own_redis: str, tmp_path: Path) -> None:
    port = free_port()
    make_model(tmp_path / "files", tied=True)
    with started(kind, own_redis, tmp_path, port) as service:
        service.wait_until_it_says(f"the model hub http://127.0.0.1:{port} is away (")
        service.wait_until_it_says("asked again for up to 30 minutes; see that this machine reaches it")
        with served(Hub(NAME, tmp_path / "files"), port):
            service.wait_until_it_serves()
        assert service.stop() == 0
    # Now that its files are here it needs no hub.
    with started(kind, own_redis, tmp_path, port) as service:
        service.wait_until_it_serves()
        assert "is away" not in service.log.read_text()
        assert service.stop() == 0


@pytest.mark.parametrize("kind", COMMANDS)
def test_who_waits_for_a_hub_ends_when_asked_to(kind: str, own_redis: str, tmp_path: Path) -> None:
    with started(kind, own_redis, tmp_path, free_port()) as service:
        service.wait_until_it_says("asked again for up to 30 minutes")
        assert service.stop() == 0


@pytest.mark.parametrize("kind", COMMANDS)
def test_a_model_that_a_hub_does_not_have_ends_who_would_serve_it(
    kind: str, own_redis: str, tmp_path: Path
) -> None:
    make_model(tmp_path / "files", tied=True)
    hub = Hub("org/other", tmp_path / "files")
    hub.status, hub.error_code = 404, "RepoNotFound"
    with served(hub) as url, started(kind, own_redis, tmp_path, int(url.rpartition(":")[2])) as service:
        assert service.process.wait(120) == REFUSED
        last = service.log.read_text().splitlines()[-1]
    assert f"{url} has no model {NAME}, or none for whoever is not logged in: correct its id" in last
