"""One real cluster for all tests of this folder, started by `tinsmith up` and driven by the tinker SDK.

Where several processes run the tests each has its own, and takes whole rooms.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import redis
import tinker

from services.common.process import failpoints
from services.common.process.process import die_with_parent
from services.common.state.registry import ServiceRecord
from services.common.storage.data_dir import DataDir
from services.common.tls.wires import Identity, name_of
from services.launcher.machine import free_port
from tests.announced import find
from tinsmith.internal.v1 import sampler_pb2, sampler_pb2_grpc

BASE_MODEL = "tinsmith/tiny"
VOCAB = 512
CONTEXT = 512
PENDING_BYTES = 1_000_000
"""What a model's requests that wait may have in these clusters."""
ROOMS = ("contract", "running", "sampling", "training", "documents")
"""They are begun in this order, the long ones first: begun last, one would run alone."""
_ENDING_S = 30.0


@dataclass
class Cluster:
    """A running `tinsmith up`."""

    process: subprocess.Popen[bytes]
    data_dir: Path
    model_dir: Path
    port: int
    grpc_port: int
    log: Path
    failpoints: Path
    """Where a test arms failpoints of the cluster's processes (services/common/process/faults/armed.py)."""
    clients: list[tinker.ServiceClient] = field(default_factory=list)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def api_key(self) -> str:
        return (self.data_dir / "api_key").read_text().split()[0]

    def service_client(self, api_key: str | None = None) -> tinker.ServiceClient:
        """A new SDK session."""
        client = tinker.ServiceClient(base_url=self.base_url, api_key=api_key or self.api_key)
        self.clients.append(client)
        return client

    def rest_client(self) -> tinker.RestClient:
        """The SDK without a session."""
        return tinker.RestClient(base_url=self.base_url, api_key=self.api_key)

    def pid(self, name: str) -> int:
        return int((self.data_dir / "run" / f"{name}.pid").read_text())

    def snapshot(self, model_id: str, version: int | None = None) -> Path:
        """Directory of a model's snapshot, the newest unless a version is given."""
        root = self.data_dir / "snapshots" / model_id
        newest = max(int(path.name) for path in root.iterdir() if path.name.isdigit())
        return root / str(version if version is not None else newest)

    def kill_and_wait(self, name: str, timeout: float = 300) -> None:
        """SIGKILLs a process and waits until the supervisor has it running and ready again."""
        before = self.pid(name)
        os.kill(before, signal.SIGKILL)
        self.wait_until_back(name, before, timeout)

    def wait_until_back(self, name: str, before: int, timeout: float = 300) -> None:
        """Waits until a process that had the pid `before` serves again."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self._back(name, before):
                return
            time.sleep(0.5)
        raise AssertionError(f"{name} did not come back in {timeout:.0f} s; log:\n{self.tail()}")

    def _back(self, name: str, before: int) -> bool:
        try:
            return self.pid(name) != before and name in self.ready()
        except (OSError, ValueError):
            return False

    def ready(self) -> set[str]:
        """Names of the services that have announced themselves."""
        return {service["id"] for service in self.status().get("services", [])}

    def status(self) -> dict[str, Any]:
        """What `tinsmith status` reports."""
        command = [sys.executable, "-m", "services.launcher.cli", "status", "--json"]
        command += ["--data-dir", str(self.data_dir)]
        output = subprocess.run(command, capture_output=True, timeout=120).stdout
        return json.loads(output or b"{}")

    def sampler_record(self, name: str) -> ServiceRecord | None:
        """What a sampler announces."""
        with redis.Redis.from_url((self.data_dir / "run" / "redis_url").read_text().strip()) as client:
            return find(client, "sampler", name)

    def sampler_status(self, name: str) -> sampler_pb2.GetSamplerStatusResponse:
        """What a sampler tells an operator.

        Raises:
            AssertionError: it is not announced.
        """
        found = self.sampler_record(name)
        assert found is not None, f"{name} is not announced"
        operator = Identity(DataDir(self.data_dir).tls / "operator").channel_credentials()
        named = [("grpc.ssl_target_name_override", name_of("sampler"))]
        with grpc.secure_channel(found.address, operator, named) as channel:
            stub = sampler_pb2_grpc.SamplerServiceStub(channel)
            return stub.GetSamplerStatus(sampler_pb2.GetSamplerStatusRequest(), timeout=60)

    def tail(self, lines: int = 60) -> str:
        logs = [self.log, *sorted((self.data_dir / "logs").glob("*.log"))]
        return "\n".join(
            f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
            for path in logs
            if path.exists()
        )


def start_cluster(
    directory: Path, model_dir: Path, *options: str, name: str = BASE_MODEL, timeout: float = 420
) -> Cluster:
    """Starts `tinsmith up` with a model of this name and returns when it serves.

    Raises:
        AssertionError: it did not come up; the message holds the logs' ends.
    """
    cluster = launch_cluster(directory, model_dir, *options, name=name)
    until(
        cluster,
        lambda: "TINKER_BASE_URL" in cluster.log.read_text(errors="replace") and serves(cluster),
        timeout,
    )
    return cluster


def until(cluster: Cluster, holds: Callable[[], bool], timeout: float) -> None:
    """Waits for something while `tinsmith up` runs.

    Raises:
        AssertionError: it did not come; the message holds the logs' ends.
    """
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and cluster.process.poll() is None:
        if holds():
            return
        time.sleep(0.5)
    report = cluster.tail()
    cluster.process.kill()
    raise AssertionError(f"the cluster did not come up in {timeout:.0f} s:\n{report}")


def launch_cluster(directory: Path, model_dir: Path, *options: str, name: str = BASE_MODEL) -> Cluster:
    """Starts `tinsmith up` with a model of this name and returns at once."""
    port, grpc_port = free_port(), free_port()
    data_dir = directory / "data"
    log = directory / "up.log"
    armed = directory / "failpoints"
    armed.mkdir(exist_ok=True)
    command = [
        *(sys.executable, "-m", "services.launcher.cli", "up", "--model", f"{name}={model_dir}"),
        *("--port", str(port), "--grpc-port", str(grpc_port), "--data-dir", str(data_dir)),
        *("--device", "cpu", "--dtype", "float32", *options),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={
                **os.environ,
                failpoints.VARIABLE: f"dir:{armed}",
                "TINSMITH_PENDING_BYTES": str(PENDING_BYTES),
            },
            # A test run that is killed leaves no cluster behind.
            preexec_fn=lambda: die_with_parent(signal.SIGTERM),
        )
    return Cluster(process, data_dir, model_dir, port, grpc_port, log, armed)


def serves(cluster: Cluster) -> bool:
    try:
        with urllib.request.urlopen(f"{cluster.base_url}/api/v1/healthz", timeout=5) as reply:
            return reply.status == 200
    except OSError:
        return False


def stop_cluster(cluster: Cluster, signal_number: int = signal.SIGINT) -> list[psutil.Process]:
    """Ends the sessions and stops `tinsmith up` with a signal; returns the cluster's processes that are still
    alive."""
    # Else they would ask for the cluster, and say so, for as long as this process lives.
    futures.wait([client.close("success").future() for client in cluster.clients], _ENDING_S)
    family = psutil.Process(cluster.process.pid).children(recursive=True)
    cluster.process.send_signal(signal_number)
    cluster.process.wait(timeout=180)
    _, alive = psutil.wait_procs(family, timeout=60)
    return alive


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Several processes (loadgroup) take whole rooms: tests of one may count on what was tested before them
    in the same cluster. Before xdist looks."""
    ranks = {Path(__file__).parent / room: rank for rank, room in enumerate(ROOMS)}
    own = sorted(
        (item for item in items if item.path.parent in ranks), key=lambda item: ranks[item.path.parent]
    )
    for item in own:
        item.add_marker(pytest.mark.xdist_group(item.path.parent.name))
    in_order = iter(own)
    items[:] = [next(in_order) if item.path.parent in ranks else item for item in items]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from services.launcher.tiny_model import make_tiny_model

    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_model(
        directory, vocab=VOCAB, hidden=64, layers=2, heads=2, kv_heads=1, intermediate=128, context=CONTEXT
    )
    return directory


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Cluster]:
    running = start_cluster(tmp_path_factory.mktemp("cluster"), model_dir, "--gateways", "2")
    yield running
    left = stop_cluster(running)
    assert left == [], f"processes left behind: {left}"
    assert running.process.returncode == 0


@pytest.fixture
def service(cluster: Cluster) -> tinker.ServiceClient:
    return cluster.service_client()


@pytest.fixture
def training(service: tinker.ServiceClient) -> tinker.TrainingClient:
    """A fresh model, rank 8, seed 7."""
    return service.create_lora_training_client(BASE_MODEL, rank=8, seed=7).result()
