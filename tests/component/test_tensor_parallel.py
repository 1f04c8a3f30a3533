"""A replica of two tensor-parallel workers: each takes its slice of what both receive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from services.common import weights
from services.common.contract.tensors import TensorSpec
from services.common.process import rpc
from tests.component.own_redis import redis_server
from tests.component.sampler_process import (
    MODEL_ID,
    Sampler,
    floats,
    ints,
    join,
    launch,
    make_adapter,
    make_full,
    make_model,
    prompt,
    request,
    sample,
    wait_ready,
    write_full,
    write_snapshot,
)
from tests.reference import Reference
from tinsmith.internal.v1 import sampler_pb2, sampler_pb2_grpc
from tinsmith.v1 import models_pb2, types_pb2

pytestmark = [pytest.mark.heavy, pytest.mark.long]

TOLERANCE = 1e-4
STORED, FULL, BROADCAST = 1, 2, 3


@pytest.fixture
async def sampler(tmp_path: Path) -> AsyncIterator[Sampler]:
    model_dir = make_model(tmp_path / "model", tied=False)
    options = ("--tensor-parallel-size", "2", "--max-loras", "2", "--kv-cache-gib", "0.25")
    with redis_server(tmp_path) as redis_url:
        started = launch(tmp_path, model_dir, redis_url, *options)
        write_snapshot(started.data_dir.snapshot(MODEL_ID, STORED), make_adapter(STORED, 8), 8)
        write_full(started.data_dir.snapshot(MODEL_ID, FULL), model_dir, make_full(model_dir, FULL))
        try:
            yield wait_ready(started)
        finally:
            assert started.stop() == 0, started.log.read_text()[-3000:]


async def check(
    stub: sampler_pb2_grpc.SamplerServiceStub, version: int, judge: Reference, length: int = 20
) -> None:
    """Scores of the prompt and of what is sampled are the reference's."""
    result = await sample(stub, request(prompt(version, length), version, scores=True, max_tokens=12))
    sequence = result.sequences[0]
    expected = judge.sequence_logprobs(prompt(version, length) + ints(sequence.tokens))
    found = torch.cat([floats(result.prompt_logprobs)[1:], floats(sequence.logprobs)])
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


async def test_two_workers_answer_as_the_reference_from_store_and_from_wire(
    sampler: Sampler, tmp_path: Path
) -> None:
    stored = sampler.data_dir.snapshot(MODEL_ID, STORED)
    async with rpc.channel(sampler.address) as channel:
        stub = sampler_pb2_grpc.SamplerServiceStub(channel)
        await check(stub, 0, Reference(sampler.model_dir))
        await check(stub, STORED, Reference(sampler.model_dir, stored))
        group = await join(stub, sampler, epoch=1, workers=2)
        tensors = make_adapter(BROADCAST, 16)
        buffer, specs = weights.pack(tensors)
        sent = asyncio.create_task(asyncio.to_thread(group.broadcast, buffer, 120))
        await stub.ReceiveSnapshot(_incoming(buffer, specs), timeout=150)
        await sent
        arrived = write_snapshot(tmp_path / "peft", tensors, 16)
        await check(stub, BROADCAST, Reference(sampler.model_dir, arrived))
        await check(stub, FULL, Reference(sampler.data_dir.snapshot(MODEL_ID, FULL)))
        await check(stub, STORED, Reference(sampler.model_dir, stored))
        group.abort()


def _incoming(buffer: torch.Tensor, specs: list[TensorSpec]) -> sampler_pb2.ReceiveSnapshotRequest:
    return sampler_pb2.ReceiveSnapshotRequest(
        epoch=1,
        snapshot=sampler_pb2.Snapshot(model_id=MODEL_ID, version=BROADCAST),
        lora=models_pb2.LoraConfig(rank=16, train_attn=True, train_mlp=True, train_unembed=True),
        tensors=[
            sampler_pb2.TensorSpec(name=spec.name, dtype=types_pb2.DATA_TYPE_FLOAT32, shape=spec.shape)
            for spec in specs
        ],
        checksum=weights.checksum(buffer),
        timeout_seconds=120,
    )
