"""Snapshots over the wire, to one real sampler: this test process is the trainer, rank 0 of the group."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from services.common import weights
from tests.component.sampler.process import (
    HIDDEN,
    MODEL_ID,
    NEVER,
    Sampler,
    floats,
    incoming,
    ints,
    join,
    make_adapter,
    prompt,
    request,
    sample,
    status,
    until_running,
    write_snapshot,
)
from tests.reference import Reference, check_logprobs
from tinsmith.internal.v1 import sampler_pb2

GLOO = sampler_pb2.WEIGHT_MEDIUM_GLOO

pytestmark = pytest.mark.heavy


async def test_a_broadcast_snapshot_serves_while_running_generations_go_on_undisturbed(
    stub, judge, sampler: Sampler, tmp_path: Path
) -> None:
    group = await join(stub, sampler, epoch=1)
    assert (await status(stub)).group_epoch == 1
    running = [
        asyncio.create_task(sample(stub, request(prompt(60, 10), v, seed=4, max_tokens=500, stop=NEVER)))
        for v in (0, 1)
    ]
    await until_running(stub, lambda running: running == 2)
    # No directory for version 100 in the store: the wire is the only way it can arrive.
    tensors = make_adapter(100, 32)
    buffer, specs = weights.pack(tensors)
    sent = asyncio.create_task(
        asyncio.to_thread(group.broadcast_buckets, buffer.split(weights.BUCKET_BYTES), 120)
    )
    await stub.ReceiveSnapshot(incoming(1, 100, 32, buffer, specs), timeout=150)
    await sent
    assert not any(task.done() for task in running)
    result = await sample(stub, request(prompt(61, 40), 100, scores=True, max_tokens=16))
    assert sampler_pb2.Snapshot(model_id=MODEL_ID, version=100) in (await status(stub)).resident
    arrived = Reference(sampler.model_dir, write_snapshot(tmp_path / "peft", tensors, 32))
    expected = arrived.sequence_logprobs(prompt(61, 40))
    check_logprobs(floats(result.prompt_logprobs)[1:], expected)
    for version, task in zip((0, 1), running, strict=True):
        sequence = (await task).sequences[0]
        tokens = prompt(60, 10) + ints(sequence.tokens)
        check_logprobs(floats(sequence.logprobs), judge(version).sequence_logprobs(tokens)[9:])
    group.abort()


async def test_a_damaged_broadcast_is_refused_and_ends_the_group(stub, sampler: Sampler) -> None:
    group = await join(stub, sampler, epoch=2)
    buffer, specs = weights.pack(make_adapter(101, 8))
    wanted = incoming(2, 101, 8, buffer, specs)
    wanted.checksum ^= 1
    sent = asyncio.create_task(
        asyncio.to_thread(group.broadcast_buckets, buffer.split(weights.BUCKET_BYTES), 120)
    )
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.ReceiveSnapshot(wanted, timeout=150)
    await sent
    assert error.value.code() is grpc.StatusCode.DATA_LOSS
    assert (await status(stub)).group_epoch == 0
    assert sampler_pb2.Snapshot(model_id=MODEL_ID, version=101) not in (await status(stub)).resident
    group.abort()


async def test_a_group_that_never_comes_together_is_given_up_and_a_new_one_works(
    stub, sampler: Sampler, tmp_path: Path
) -> None:
    absent = sampler_pb2.JoinGroupRequest(epoch=3, first_rank=1, world_size=2, timeout_seconds=1, medium=GLOO)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.JoinGroup(absent, timeout=150)
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    tensors = make_adapter(102, 8, mlp=False)
    buffer, specs = weights.pack(tensors)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.ReceiveSnapshot(incoming(3, 102, 8, buffer, specs), timeout=150)
    assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    group = await join(stub, sampler, epoch=4)
    sent = asyncio.create_task(
        asyncio.to_thread(group.broadcast_buckets, buffer.split(weights.BUCKET_BYTES), 120)
    )
    await stub.ReceiveSnapshot(incoming(4, 102, 8, buffer, specs), timeout=150)
    await sent
    result = await sample(stub, request(prompt(70, HIDDEN), 102, scores=True))
    arrived = Reference(sampler.model_dir, write_snapshot(tmp_path / "peft", tensors, 8))
    expected = arrived.sequence_logprobs(prompt(70, HIDDEN))
    check_logprobs(floats(result.prompt_logprobs)[1:], expected)
    group.abort()
