"""What a process measures can be fetched, and goes when it ends."""

from __future__ import annotations

import asyncio
from urllib.error import URLError
from urllib.request import Request, urlopen

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import REGISTRY, Gauge
from prometheus_client.parser import text_string_to_metric_families

from services.common.contract.errors import Unavailable
from services.common.process import rpc
from services.common.process.periodic import Periodic
from services.common.telemetry import metrics
from services.launcher.machine import free_port


async def fetched(port: int) -> dict[str, float]:
    """{name and labels: value} of what is served."""
    text = await asyncio.to_thread(lambda: urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read())
    families = text_string_to_metric_families(text.decode())
    return {
        one.name + "".join(f",{value}" for value in one.labels.values()): one.value
        for family in families
        for one in family.samples
    }


async def test_readings_are_those_of_now_and_made_in_the_loop() -> None:
    port, held = free_port(), [1, 2]
    loops = []

    def read() -> float:
        loops.append(asyncio.get_running_loop())
        return len(held)

    readings = [
        metrics.Reading("held_things", "Things", read),
        metrics.Reading("seen_total", "Seen", lambda: 7),
        metrics.Reading("kept_bytes", "Kept", lambda: {"here": len(held), "there": 0.5}, "place"),
    ]
    async with metrics.served("127.0.0.1", port, readings):
        assert (await fetched(port))["tinsmith_held_things"] == 2
        held.append(3)
        found = await fetched(port)
        assert found["tinsmith_held_things"] == 3
        assert found["tinsmith_seen_total"] == 7
        assert (found["tinsmith_kept_bytes,here"], found["tinsmith_kept_bytes,there"]) == (3, 0.5)
    assert set(loops) == {asyncio.get_running_loop()}
    with pytest.raises(URLError):
        await fetched(port)


async def test_readings_may_come_when_what_they_read_is_there() -> None:
    port = free_port()
    late = metrics.Reading("late_things", "Things", lambda: 3)
    async with metrics.served("127.0.0.1", port) as served:
        assert "tinsmith_late_things" not in await fetched(port)
        with served.reading([late]):
            assert (await fetched(port))["tinsmith_late_things"] == 3
        assert "tinsmith_late_things" not in await fetched(port)


async def test_nothing_is_served_on_port_0_and_a_taken_port_is_said() -> None:
    async with metrics.served("127.0.0.1", 0):
        pass
    port = free_port()
    async with metrics.served("127.0.0.1", port):
        with pytest.raises(Unavailable, match=str(port)):
            async with metrics.served("127.0.0.1", port):
                pass


async def test_calls_are_counted_by_method_and_how_they_ended() -> None:
    def seen(method: str, code: str) -> float:
        labels = {"method": f"/grpc.health.v1.Health/{method}", "code": code}
        return REGISTRY.get_sample_value("tinsmith_rpc_seconds_count", labels) or 0.0

    server = await rpc.serve([], "127.0.0.1:0")
    before = {code: seen("Check", code) for code in ("OK", "NOT_FOUND")}
    try:
        async with rpc.channel(f"127.0.0.1:{server.port}") as channel:
            health = health_pb2_grpc.HealthStub(channel)
            await health.Check(health_pb2.HealthCheckRequest(), timeout=10)
            with pytest.raises(grpc.aio.AioRpcError):
                await health.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=10)
            unknown = channel.unary_unary("/nobody.Service/Method")
            with pytest.raises(grpc.aio.AioRpcError):
                await unknown(b"", timeout=10)
    finally:
        await server.drain(0)
    assert {code: seen("Check", code) - before[code] for code in before} == {"OK": 1, "NOT_FOUND": 1}
    methods = {
        one.labels["method"]
        for family in REGISTRY.collect()
        if family.name == "tinsmith_rpc_seconds"
        for one in family.samples
    }
    assert not any("nobody" in method for method in methods)


async def test_steps_that_fail_in_the_background_are_counted_by_their_work() -> None:
    runs = 0

    async def fail() -> None:
        nonlocal runs
        runs += 1
        raise Unavailable("not now")

    work = Periodic("a work of this test", 0.001, fail, 1)
    work.start()
    for _ in range(10_000):
        if work.failures_in_a_row >= 2:
            break
        await asyncio.sleep(0.002)
    await work.stop()
    counted = REGISTRY.get_sample_value("tinsmith_periodic_failures_total", {"work": "a work of this test"})
    assert counted == runs >= 2


PROMETHEUS_2 = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,*/*;q=0.1"
)


@pytest.mark.parametrize("accept", ["", "*/*", PROMETHEUS_2, PROMETHEUS_3])
async def test_names_are_the_same_whoever_asks_also_those_of_the_engine(accept: str) -> None:
    registered = Gauge("engine:used_share", "Named as vLLM names its own")
    port = free_port()
    try:
        async with metrics.served("127.0.0.1", port):
            request = Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
            reply = await asyncio.to_thread(urlopen, request, timeout=10)
            with reply:
                assert "\nengine:used_share 0.0\n" in reply.read().decode()
    finally:
        REGISTRY.unregister(registered)
