"""A sampler process ends as it should, whatever ends it, and leaves no process behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest

from services.common.contract.errors import Unavailable
from services.common.process import rpc
from services.common.process.carrier.asking import Link
from services.common.state import registry
from services.common.state.redis_client import connect
from services.gateway.cluster.discovery import call_error
from tests.component.own_redis import started_redis
from tests.component.sampler.process import (
    NEVER,
    floats,
    ints,
    launch,
    make_model,
    request,
    wait_ready,
)
from tests.reference import Reference, check_logprobs
from tinsmith.internal.v1 import sampler_pb2, sampler_pb2_grpc
from tinsmith.v1 import sampling_pb2

pytestmark = pytest.mark.heavy

SAMPLE = "/tinsmith.internal.v1.SamplerService/Sample"


redis_url = pytest.fixture(started_redis, scope="module", name="redis_url")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Embedding and output head of their own, unlike the model of test_sampler.py."""
    return make_model(tmp_path_factory.mktemp("model") / "untied", tied=False)


@pytest.fixture
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of the temporary files of processes that are started within the test."""
    # A path that is short enough for sockets.
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        monkeypatch.setenv("TMPDIR", directory)
        yield
        assert list(Path(directory).iterdir()) == []


@pytest.mark.usefixtures("nothing_is_left")
async def test_sigterm_lets_running_requests_finish_and_refuses_new_ones(
    tmp_path: Path, model_dir: Path, redis_url: str
) -> None:
    sampler = launch(tmp_path, model_dir, redis_url)
    snapshot = sampler.store_adapter(1)
    await asyncio.to_thread(wait_ready, sampler)
    family = sampler.family()
    async with rpc.channel(sampler.address) as channel, rpc.channel(sampler.address) as late:
        stub, link = sampler_pb2_grpc.SamplerServiceStub(channel), Link(channel)
        long = request([5, 6, 7], 1, n=16, max_tokens=500, stop=NEVER)
        running = asyncio.create_task(link.ask(SAMPLE, long, sampler_pb2.SampleResponse, 240))
        while not (await stub.GetSamplerStatus(sampler_pb2.GetSamplerStatusRequest())).running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        # To the whole process group, as Ctrl-C in a terminal does.
        os.killpg(sampler.process.pid, signal.SIGTERM)
        await until_draining(redis_url)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await sampler_pb2_grpc.SamplerServiceStub(late).Sample(request([1]), timeout=60)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        with pytest.raises((Unavailable, grpc.aio.AioRpcError)):
            await link.ask(SAMPLE, request([1]), sampler_pb2.SampleResponse, 60)
        result = (await running).result
    judge = Reference(model_dir, snapshot)
    for sequence in result.sequences:
        tokens = ints(sequence.tokens)
        assert (len(tokens), sequence.stop_reason) == (500, sampling_pb2.STOP_REASON_LENGTH)
    expected = judge.sequence_logprobs([5, 6, 7, *tokens])[2:]
    check_logprobs(floats(sequence.logprobs), expected)
    assert await asyncio.to_thread(sampler.process.wait, 120) == 0, sampler.log.read_text()[-3000:]
    assert gone(family)
    assert not (sampler.data_dir.run / "sampler-0.pid").exists()
    client = connect(redis_url)
    assert await registry.live(client, "sampler") == []
    await client.aclose()


@pytest.mark.parametrize("fault", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)])
async def test_when_the_engine_dies_or_hangs_requests_fail_as_retryable_and_the_process_ends(
    tmp_path: Path, model_dir: Path, redis_url: str, fault: signal.Signals
) -> None:
    started = launch(tmp_path, model_dir, redis_url, "--stall-seconds", "6")
    sampler = await asyncio.to_thread(wait_ready, started)
    family = sampler.family()
    async with rpc.channel(sampler.address) as channel:
        stub, link = sampler_pb2_grpc.SamplerServiceStub(channel), Link(channel)
        long = request([5, 6, 7], n=4, max_tokens=500, stop=NEVER)
        carried = asyncio.create_task(link.ask(SAMPLE, long, sampler_pb2.SampleResponse, 240))
        running = stub.Sample(request([5, 6, 7], n=4, max_tokens=500, stop=NEVER), timeout=240)
        while (await stub.GetSamplerStatus(sampler_pb2.GetSamplerStatusRequest())).running < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for process in family:
            # Python's own helper ends with the pipe to its parent, unless it is stopped.
            if "resource_tracker" not in " ".join(command(process)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(fault)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await running
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        with pytest.raises((Unavailable, grpc.aio.AioRpcError)) as of_carried:
            await carried
        assert type(of_carried.value) is Unavailable or call_error(of_carried.value).code == "unavailable"
    assert await asyncio.to_thread(sampler.process.wait, 120) == 1
    assert gone(family)
    assert ("the engine is stuck" in sampler.log.read_text()) == (fault == signal.SIGSTOP)


async def until_draining(redis_url: str) -> None:
    async with connect(redis_url) as client, asyncio.timeout(120):
        while [record.state for record in await registry.live(client, "sampler")] == ["ready"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


# While the engine's interpreter starts, and while it has only just begun to import.
@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_sigkill_at_any_time_leaves_no_engine_behind(
    tmp_path: Path, model_dir: Path, redis_url: str, seconds: float
) -> None:
    sampler = launch(tmp_path, model_dir, redis_url)
    deadline = time.monotonic() + 420
    while not (family := engines(sampler.process.pid)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert family, "no engine process was started"
    time.sleep(seconds)
    os.kill(sampler.process.pid, signal.SIGKILL)
    sampler.process.wait(60)
    assert gone(family)


def engines(pid: int) -> list[psutil.Process]:
    """Child processes that the engine spawned."""
    return [
        process
        for process in psutil.Process(pid).children(recursive=True)
        if any("spawn_main" in part for part in command(process))
    ]


def command(process: psutil.Process) -> list[str]:
    """Its command line; nothing of one that has ended, as what libraries ask while they load soon has."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def gone(processes: list[psutil.Process]) -> bool:
    """All have ended, or do soon."""
    return not psutil.wait_procs(processes, timeout=60)[1]
