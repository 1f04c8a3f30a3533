"""A cluster whose every connection can be disturbed and whose every process can be hurt.

The SDK reaches the gateways, the services reach Redis, and gateways and trainer reach trainer and samplers
each through a proxy of their own: the last by the address that these announce, 127.0.0.2, where nothing
listens but the proxy.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import psutil

from services.common.process.faults import armed
from services.common.state import registry
from tests.announced import announced
from tests.cluster.conftest import Cluster, free_port, start_cluster, stop_cluster
from tests.robustness.oracle import MICRO_BATCH_TOKENS
from tests.robustness.proxy import Wire
from tests.robustness.redis_process import RedisProcess

ADVERTISED = "127.0.0.2"
_POLL_S = 0.05


class World:
    """The cluster with its proxies.

    Attributes:
        sdk, state, services: what SDK and gateways, all services and Redis, and the services among
            themselves talk through.
        url: base URL for clients.
        injected_at: monotonic time at which the last fault began.
    """

    def __init__(self, directory: Path, model_dir: Path, trainer_ranks: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.trainer_ranks = trainer_ranks
        self.injected_at = 0.0
        self.redis = RedisProcess(directory / "redis", free_port())
        self.sdk, self.state, self.services = Wire(), Wire(), Wire()
        state_port = self.state.route(("127.0.0.1", 0), ("127.0.0.1", self.redis.port))
        self._routed: set[int] = set()
        self._closing = threading.Event()
        self._router = threading.Thread(target=self._route_services, name="router", daemon=True)
        self._router.start()
        environment = {
            "TINSMITH_ADVERTISE_HOST": ADVERTISED,
            "TINSMITH_MICRO_BATCH_TOKENS": str(MICRO_BATCH_TOKENS),
            # Results are looked at when all is over.
            "TINSMITH_FETCHED_RESULT_LIFE": str(24 * 3600),
            "TINSMITH_REDIS_URL": self.redis.url_through(state_port),
        }
        options = ("--gateways", "2", "--samplers", "2", "--trainer-ranks", str(trainer_ranks))
        with mock.patch.dict(os.environ, environment):
            self.cluster: Cluster = start_cluster(directory, model_dir, *options)
        self.failpoints = self.cluster.failpoints
        port = self.sdk.route(("127.0.0.1", 0), ("127.0.0.1", self.cluster.port))
        self.url = f"http://127.0.0.1:{port}"

    def close(self) -> list[psutil.Process]:
        """Stops everything; processes that are left."""
        for wire in (self.sdk, self.state, self.services):
            wire.mend()
        left = stop_cluster(self.cluster)
        self._closing.set()
        self._router.join(30)
        for wire in (self.sdk, self.state, self.services):
            wire.close()
        self.redis.close()
        return left

    def _route_services(self) -> None:
        while not self._closing.wait(_POLL_S):
            for record in self.records():
                host, _, port = record.address.rpartition(":")
                if host == ADVERTISED and int(port) not in self._routed:
                    self._routed.add(int(port))
                    self.services.route((ADVERTISED, int(port)), ("127.0.0.1", int(port)))

    def records(self) -> list[registry.ServiceRecord]:
        """Services that are announced; none while Redis is away."""
        found: list[registry.ServiceRecord] = []
        try:
            for kind in registry.KINDS:
                found += announced(self.redis.client, kind)
        except Exception:
            return []
        return found

    def wait_ready(self, name: str, timeout: float = 420) -> psutil.Process:
        """The process of that name, once it runs and its service is announced."""
        announced = "trainer-0" if name.startswith("trainer") else name
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            try:
                process = psutil.Process(self.cluster.pid(name))
                started = process.create_time()
                if any(record.id == announced for record in self.records()) and started:
                    return process
            except (OSError, ValueError, psutil.Error):
                pass
            time.sleep(_POLL_S)
        raise AssertionError(f"{name} is not ready after {timeout:.0f} s:\n{self.cluster.tail()}")

    def send(self, name: str, number: signal.Signals) -> None:
        """Signals a process once it is ready."""
        process = self.wait_ready(name)
        self.injected_at = time.monotonic()
        process.send_signal(number)

    def stop(self, name: str, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after so long."""
        process = self.wait_ready(name)
        self.injected_at = time.monotonic()
        process.suspend()
        time.sleep(seconds)
        process.resume()

    def kill_engine(self, sampler: str) -> None:
        """SIGKILLs the engine core of a sampler: the child that uses most memory."""
        children = self.wait_ready(sampler).children(recursive=True)
        self.injected_at = time.monotonic()
        max(children, key=lambda child: child.memory_info().rss).kill()

    def fail_at(self, point: str, action: str, timeout: float = 300) -> None:
        """Arms a failpoint and returns when it has fired."""
        armed.arm(self.failpoints, point, action)
        self.wait_fired(point, timeout)

    def wait_fired(self, point: str, timeout: float = 300) -> None:
        """Returns when an armed failpoint has fired."""
        deadline = time.monotonic() + timeout
        while point in armed.armed(self.failpoints):
            if time.monotonic() > deadline:
                armed.disarm(self.failpoints)
                raise AssertionError(f"nothing came to {point} in {timeout:.0f} s:\n{self.cluster.tail()}")
            time.sleep(0.02)
        self.injected_at = time.monotonic()

    def any_of(self, kind: str) -> str:
        """The name of a gateway or sampler that is ready, of several the one that is longest."""
        deadline = time.monotonic() + 420
        while True:
            ready = sorted(record.id for record in self.records() if record.kind == kind)
            alive = [name for name in ready if self._started(name) > 0]
            if alive:
                return min(alive, key=self._started)
            assert time.monotonic() < deadline, f"no {kind} is ready"
            time.sleep(_POLL_S)

    def _started(self, name: str) -> float:
        try:
            return psutil.Process(self.cluster.pid(name)).create_time()
        except (OSError, ValueError, psutil.Error):
            return 0.0

    @contextmanager
    def trouble(self, wire: Wire, seconds: float, begin: Callable[[], None]) -> Iterator[None]:
        """Trouble on a wire for so long; then its connections are cut, as a router does that restarts."""
        self.injected_at = time.monotonic()
        begin()
        yield
        time.sleep(seconds)
        wire.mend()
        wire.reset()
