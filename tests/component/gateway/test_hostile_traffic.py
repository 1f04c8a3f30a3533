"""What clients do that have no key, or mean no good, costs a gateway little and its other clients nothing."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.component.gateway.hostile import Http2, http1, send_for
from tests.component.gateway.process import MIB, GatewayProcess, launch, watched

FLOOD_S = 8
BEARABLE_S = 4
"""A gateway that stands still while it is flooded answers nobody for longer."""
FORWARD_BACKWARD = "/tinsmith.v1.TinsmithService/ForwardBackward"


@pytest.fixture
def start(redis_url: str, tmp_path: Path) -> Iterator[Callable[..., GatewayProcess]]:
    started: list[GatewayProcess] = []

    def run(*flags: str) -> GatewayProcess:
        started.append(launch(redis_url, tmp_path, f"gateway-{len(started)}", *flags))
        return started[-1].wait_ready()

    yield run
    for gateway in started:
        gateway.process.kill()
        gateway.process.communicate(timeout=60)


async def test_messages_without_a_key_are_never_received(start: Callable) -> None:
    gateway = start()
    taken = []

    async def flood() -> None:
        until = time.monotonic() + FLOOD_S
        while time.monotonic() < until:
            async with Http2.connected(gateway.grpc_port) as connection:
                connection.open(1, FORWARD_BACKWARD)
                taken.append(await connection.send(1, 200 * MIB))

    async with watched(gateway) as seen:
        await asyncio.gather(*(flood() for _ in range(10)))
    print(f"{seen}; {len(taken)} calls, of which the server took {max(taken) / MIB:.1f} MiB at most")
    assert max(taken) < 2 * MIB
    assert seen.grown_mib < 60
    assert seen.slowest(0.99) < BEARABLE_S


async def test_heads_without_end_and_idle_connections_cost_little(start: Callable) -> None:
    gateway = start()
    async with watched(gateway) as seen, asyncio.TaskGroup() as attack, AsyncExitStack() as opened:
        for _ in range(500):
            await opened.enter_async_context(http1(gateway.port))
        for number in range(100):
            attack.create_task(
                send_for(FLOOD_S, gateway.port, b"GET / HTTP/1.1\r\n", b"x-%d: y\r\n" % number, 0.1)
            )
        for _ in range(10):
            attack.create_task(send_for(FLOOD_S, gateway.port, b"GET /", b"x" * 65536, 0))
    print(seen)
    assert seen.grown_mib < 60
    assert seen.slowest(0.99) < BEARABLE_S
