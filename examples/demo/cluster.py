"""A Tinsmith cluster as a child process, for as long as the demo runs.

Invariant: when a `Cluster` is left, by whatever way, it has been told to stop and has ended.
"""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from services.common.process.process import die_with_parent

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 300.0
STOP_SECONDS = 150.0


@dataclass(frozen=True)
class Endpoint:
    """Where the cluster listens, and a key it lets in."""

    base_url: str
    grpc_address: str
    api_key: str


class ClusterFailed(RuntimeError):
    """The cluster did not come up; the message holds the end of its log."""


def find_endpoint(output: str) -> Endpoint | None:
    """What `tinsmith up` prints once everything is ready, or None before that."""
    patterns = (r"TINKER_BASE_URL=(\S+)", r"gRPC on ([^\s)]+)", r"TINKER_API_KEY=(\S+)\n")
    found = [re.search(pattern, output) for pattern in patterns]
    base_url, grpc_address, api_key = (match[1] if match else None for match in found)
    if base_url is None or grpc_address is None or api_key is None:
        return None
    return Endpoint(base_url, grpc_address, api_key)


class Cluster:
    """A started cluster; leaving it as a context manager stops it."""

    def __init__(self, process: subprocess.Popen[bytes], endpoint: Endpoint) -> None:
        self._process = process
        self.endpoint = endpoint

    @property
    def pid(self) -> int:
        """Of `tinsmith up`, whose children its services are."""
        return self._process.pid

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exc_info: object) -> None:
        stop(self._process)


def start(name: str, model: str, data_dir: Path, tell: Callable[[str], None], *options: str) -> Cluster:
    """Runs `tinsmith up` with one base model and waits until it serves.

    Args:
        name: base model name for the SDK.
        model: directory or hub id of its weights.
        data_dir: where the cluster keeps its state; its output goes to `up.log` in there.
        tell: called with the newest line of output while the cluster starts.
        options: further flags of `tinsmith up`.

    Raises:
        ClusterFailed: it ended, or was not ready within START_SECONDS.
    """
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    log = data_dir / "up.log"
    # It will hold the API key.
    log.touch(mode=0o600)
    command = [sys.executable, "-m", "services.launcher.cli", "up", "--model", f"{name}={model}"]
    command += [
        "--port",
        str(free_port()),
        "--grpc-port",
        str(free_port()),
        "--data-dir",
        str(data_dir),
        *options,
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            # Ctrl-C reaches the demo alone, which then stops the cluster in order ...
            start_new_session=True,
            # ... and when the demo is killed, the kernel tells the cluster.
            preexec_fn=lambda: die_with_parent(signal.SIGTERM),
        )
    try:
        return Cluster(process, _wait_until_ready(process, log, tell))
    except BaseException:
        stop(process)
        raise


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path, tell: Callable[[str], None]) -> Endpoint:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        output = log.read_text(errors="replace")
        endpoint = find_endpoint(output)
        if endpoint is not None:
            return endpoint
        if process.poll() is not None:
            raise ClusterFailed(f"tinsmith up ended with code {process.returncode}:\n{output[-4000:]}")
        lines = output.strip().splitlines()
        if lines:
            tell(lines[-1])
        time.sleep(0.25)
    raise ClusterFailed(f"not ready after {START_SECONDS:.0f} s:\n{log.read_text(errors='replace')[-4000:]}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """Asks the cluster to drain and end, as Ctrl-C would, and kills it if it does not."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(timeout=STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
