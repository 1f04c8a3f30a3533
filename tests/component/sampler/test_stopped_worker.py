"""One of several workers stands still for longer than a call may take, and goes on: so does the engine."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import psutil
import pytest

from services.common import weights
from services.sampler.engine.calls.workers import CALL_S
from tests.component.sampler.process import (
    NEVER,
    Sampler,
    floats,
    incoming,
    ints,
    join,
    make_adapter,
    make_model,
    prompt,
    replica,
    request,
    sample,
    until_running,
    write_snapshot,
)
from tests.reference import Reference, check_logprobs
from tinsmith.internal.v1 import sampler_pb2, sampler_pb2_grpc
from tinsmith.v1 import sampling_pb2

pytestmark = [pytest.mark.heavy, pytest.mark.long]

HASTY_S = 3.0
# A sampler whose workers have less time to answer a call.
HASTY = f"""
import sys
from services.sampler.engine.calls import workers
workers.CALL_S = {HASTY_S}
from services.sampler.__main__ import main
sys.exit(main())
"""
STALL_S = 70.0
"""Longer than a call may take."""
STORED, BROADCAST = 1, 2


@contextmanager
def of_two_workers(directory: Path, *program: str) -> Iterator[Sampler]:
    model_dir = make_model(directory / "model", tied=True)
    options = ("--tensor-parallel-size", "2", "--max-loras", "2", "--kv-cache-gib", "0.25")
    with replica(directory, model_dir, *options, program=program) as started:
        started.store_adapter(STORED)
        yield started


@pytest.fixture
async def hasty(tmp_path: Path) -> AsyncIterator[Sampler]:
    with of_two_workers(tmp_path, "-c", HASTY) as started:
        yield started


@pytest.fixture
async def patient(tmp_path: Path) -> AsyncIterator[Sampler]:
    with of_two_workers(tmp_path, "-m", "services.sampler") as started:
        yield started


def workers_of(sampler: Sampler) -> list[psutil.Process]:
    """What the engine's core has started, but for Python's own helper."""
    (core,) = [child for child in psutil.Process(sampler.process.pid).children() if _is_engines(child)]
    return [child for child in core.children() if _is_engines(child)]


def _is_engines(process: psutil.Process) -> bool:
    return "resource_tracker" not in " ".join(process.cmdline())


def check(tokens: list[int], result: sampling_pb2.SampleResult, judge: Reference) -> None:
    """Sampled tokens have the reference's log-probabilities."""
    (sequence,) = result.sequences
    expected = judge.sequence_logprobs(tokens + ints(sequence.tokens))[len(tokens) - 1 :]
    check_logprobs(floats(sequence.logprobs), expected)


async def begun(stub: sampler_pb2_grpc.SamplerServiceStub) -> asyncio.Task[sampling_pb2.SampleResult]:
    """A sample of `prompt(2, 9)` that is being computed."""
    running = asyncio.create_task(sample(stub, request(prompt(2, 9), max_tokens=400, stop=NEVER)))
    await until_running(stub, lambda count: count == 1)
    return running


async def receiving(
    stub: sampler_pb2_grpc.SamplerServiceStub, wanted: sampler_pb2.ReceiveSnapshotRequest
) -> asyncio.Future[sampler_pb2.ReceiveSnapshotResponse]:
    """A job on both workers, which waits for the trainer."""
    made = asyncio.ensure_future(stub.ReceiveSnapshot(wanted, timeout=150))
    # What was asked after it they do after they began with it.
    await sample(stub, request(prompt(1, 9), max_tokens=4, stop=NEVER))
    return made


async def stop_one(
    stub: sampler_pb2_grpc.SamplerServiceStub, sampler: Sampler, call_s: float, stalled_s: float = 0
) -> None:
    """A worker stands still until a call was given up, after `call_s`, and for `stalled_s` at least, while a
    sample runs."""
    _, second = workers_of(sampler)
    assert (await stub.GetSamplerStatus(sampler_pb2.GetSamplerStatusRequest(), timeout=60)).running
    stopped = time.monotonic()
    second.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(grpc.aio.AioRpcError, match=f"did not answer tinsmith_load in {call_s:.0f} s"):
            await stub.Sample(request(prompt(3, 9), STORED), timeout=120)
        await asyncio.sleep(stopped + stalled_s - time.monotonic())
    finally:
        second.send_signal(signal.SIGCONT)


async def check_all(
    stub: sampler_pb2_grpc.SamplerServiceStub, sampler: Sampler, arrived: Path, before: list[psutil.Process]
) -> None:
    """The workers of before have what is stored, what was sent, and the base model."""
    for version, directory in ((BROADCAST, arrived), (STORED, sampler.stored(STORED)), (0, None)):
        judge = Reference(sampler.model_dir, *([] if directory is None else [directory]))
        check(prompt(4, 9), await sample(stub, request(prompt(4, 9), version, stop=NEVER)), judge)
    assert workers_of(sampler) == before
    status = await stub.GetSamplerStatus(sampler_pb2.GetSamplerStatusRequest(), timeout=60)
    assert {one.version for one in status.resident} == {STORED, BROADCAST}


async def test_a_worker_that_was_stopped_for_longer_than_a_call_may_take_goes_on_and_answers_right(
    hasty: Sampler, tmp_path: Path
) -> None:
    tensors = make_adapter(BROADCAST, 16)
    buffer, specs = weights.pack(tensors)
    async with hasty.client() as stub:
        group = await join(stub, hasty, epoch=1, workers=2)
        running, before = await begun(stub), workers_of(hasty)
        # For longer than one of them stands still.
        received = await receiving(stub, incoming(1, BROADCAST, 16, buffer, specs))
        await stop_one(stub, hasty, HASTY_S)
        await asyncio.to_thread(group.broadcast_buckets, buffer.split(weights.BUCKET_BYTES), 120)
        await received
        check(prompt(2, 9), await running, Reference(hasty.model_dir))
        await check_all(stub, hasty, write_snapshot(tmp_path / "peft", tensors, 16), before)
        group.abort()


async def test_so_does_one_that_was_stopped_for_more_than_a_minute(patient: Sampler, tmp_path: Path) -> None:
    tensors = make_adapter(BROADCAST, 16)
    buffer, specs = weights.pack(tensors)
    async with patient.client() as stub:
        group = await join(stub, patient, epoch=1, workers=2)
        running, before = await begun(stub), workers_of(patient)
        # A broadcast has deadlines of its own, which are nearer: the group breaks, and the engine does not.
        received = await receiving(stub, incoming(1, BROADCAST, 16, buffer, specs))
        await stop_one(stub, patient, CALL_S, STALL_S)
        with pytest.raises(grpc.aio.AioRpcError, match="Timed out"):
            await received
        check(prompt(2, 9), await running, Reference(patient.model_dir))
        group.abort()
        group = await join(stub, patient, epoch=2, workers=2)
        received = await receiving(stub, incoming(2, BROADCAST, 16, buffer, specs))
        await asyncio.to_thread(group.broadcast_buckets, buffer.split(weights.BUCKET_BYTES), 120)
        await received
        await check_all(stub, patient, write_snapshot(tmp_path / "peft", tensors, 16), before)
        group.abort()
