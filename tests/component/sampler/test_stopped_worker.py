"""One of several workers stands still for longer than a call may take, and goes on: so does the engine."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import psutil
import pytest
import torch

from services.common import weights
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
from tests.reference import Reference
from tinsmith.internal.v1 import sampler_pb2
from tinsmith.v1 import sampling_pb2

pytestmark = [pytest.mark.heavy, pytest.mark.long]

CALL_S = 5.0
# A sampler whose workers have less time to answer a call.
HASTY = f"""
import sys
from services.sampler.engine.calls import workers
workers.CALL_S = {CALL_S}
from services.sampler.__main__ import main
sys.exit(main())
"""
STORED, BROADCAST = 1, 2


@pytest.fixture
async def sampler(tmp_path: Path) -> AsyncIterator[Sampler]:
    model_dir = make_model(tmp_path / "model", tied=True)
    options = ("--tensor-parallel-size", "2", "--max-loras", "2", "--kv-cache-gib", "0.25")
    with replica(tmp_path, model_dir, *options, program=("-c", HASTY)) as started:
        started.store_adapter(STORED)
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
    torch.testing.assert_close(floats(sequence.logprobs), expected, atol=1e-4, rtol=0)


async def test_a_worker_that_was_stopped_for_longer_than_a_call_may_take_goes_on_and_answers_right(
    sampler: Sampler, tmp_path: Path
) -> None:
    tensors = make_adapter(BROADCAST, 16)
    buffer, specs = weights.pack(tensors)
    async with sampler.client() as stub:
        group = await join(stub, sampler, epoch=1, workers=2)
        # A job on both workers, which waits for the trainer.
        receiving = asyncio.ensure_future(
            stub.ReceiveSnapshot(incoming(1, BROADCAST, 16, buffer, specs), timeout=150)
        )
        await sample(stub, request(prompt(1, 9), max_tokens=60, stop=NEVER))
        running = asyncio.create_task(sample(stub, request(prompt(2, 9), max_tokens=400, stop=NEVER)))
        await until_running(stub, lambda count: count == 1)
        first, second = workers_of(sampler)
        second.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(grpc.aio.AioRpcError, match=f"did not answer tinsmith_load in {CALL_S:.0f} s"):
                await stub.Sample(request(prompt(3, 9), STORED), timeout=120)
        finally:
            second.send_signal(signal.SIGCONT)
        base = Reference(sampler.model_dir)
        check(prompt(2, 9), await running, base)
        await asyncio.to_thread(group.broadcast_buckets, buffer.split(weights.BUCKET_BYTES), 120)
        await receiving
        arrived = write_snapshot(tmp_path / "peft", tensors, 16)
        stored = sampler.stored(STORED)
        for version, directory in ((BROADCAST, arrived), (STORED, stored), (0, None)):
            judge = base if directory is None else Reference(sampler.model_dir, directory)
            check(prompt(4, 9), await sample(stub, request(prompt(4, 9), version, stop=NEVER)), judge)
        group.abort()
        assert workers_of(sampler) == [first, second]
        status = await stub.GetSamplerStatus(sampler_pb2.GetSamplerStatusRequest(), timeout=60)
        assert {one.version for one in status.resident} == {STORED, BROADCAST}
