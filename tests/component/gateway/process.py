"""A gateway as a process of its own, what it costs, and how fast it answers somebody meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from services.launcher.machine import free_port

ALICE, BOB = "tml-alice", "tml-bob"
MIB = 1024 * 1024


@dataclass
class GatewayProcess:
    """A started gateway."""

    process: subprocess.Popen[str]
    port: int
    grpc_port: int

    def client(self, key: str = ALICE) -> httpx.AsyncClient:
        url = f"http://127.0.0.1:{self.port}/api/v1/"
        return httpx.AsyncClient(base_url=url, headers={"x-api-key": key}, timeout=60)

    def memory(self) -> int:
        """Bytes that are resident now."""
        return psutil.Process(self.process.pid).memory_info().rss

    def wait_ready(self) -> GatewayProcess:
        wait_until(lambda: healthy(self.port))
        return self


def launch(
    redis_url: str,
    directory: Path,
    name: str,
    *flags: str,
    port: int = 0,
    grpc_port: int = 0,
    **environment: str,
) -> GatewayProcess:
    """Starts a gateway with the keys of ALICE and BOB; does not wait for it."""
    keys = directory / "api_key"
    if not keys.exists():
        keys.write_text(f"{ALICE} alice\n{BOB} bob\n")
    port, grpc_port = port or free_port(), grpc_port or free_port()
    command = [
        *(sys.executable, "-m", "services.gateway", "--id", name, "--port", str(port)),
        *("--grpc-port", str(grpc_port), "--data-dir", str(directory), *flags),
    ]
    variables = {**os.environ, "TINSMITH_REDIS_URL": redis_url, **environment}
    process = subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True)
    return GatewayProcess(process, port, grpc_port)


def wait_until(holds: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not become true in time"
        time.sleep(0.05)


def healthy(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/api/v1/healthz", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


@dataclass
class Watched:
    """What was seen of a gateway for a while."""

    before: int = 0
    peak: int = 0
    seconds: list[float] = field(default_factory=list)

    @property
    def grown_mib(self) -> float:
        return (self.peak - self.before) / MIB

    def slowest(self, quantile: float = 1.0) -> float:
        """Seconds of the slowest heartbeat, or of one at a quantile."""
        return sorted(self.seconds)[min(len(self.seconds) - 1, int(quantile * len(self.seconds)))]

    def __str__(self) -> str:
        return (
            f"memory +{self.grown_mib:.0f} MiB; {len(self.seconds)} heartbeats, "
            f"p50 {self.slowest(0.5) * 1e3:.0f} ms, p99 {self.slowest(0.99) * 1e3:.0f} ms, "
            f"slowest {self.slowest() * 1e3:.0f} ms"
        )


@contextlib.asynccontextmanager
async def watched(gateway: GatewayProcess, key: str = BOB, every: float = 0.02) -> AsyncIterator[Watched]:
    """Sends heartbeats of another key, and looks at the gateway's memory, until the context ends.

    Raises:
        httpx.HTTPStatusError: a heartbeat was refused.
    """
    seen = Watched()
    async with gateway.client(key) as client:
        session = (await client.post("create_session", json={"tags": [], "sdk_version": "0.38.0"})).json()
        seen.before = seen.peak = gateway.memory()

        async def beat() -> None:
            while True:
                started = time.monotonic()
                answer = await client.post("session_heartbeat", json={"session_id": session["session_id"]})
                answer.raise_for_status()
                seen.seconds.append(time.monotonic() - started)
                seen.peak = max(seen.peak, gateway.memory())
                await asyncio.sleep(every)

        beating = asyncio.create_task(beat())
        try:
            yield seen
        finally:
            if beating.done():
                beating.result()
            beating.cancel()
            await asyncio.wait([beating])
