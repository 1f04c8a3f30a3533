"""A replica of several workers: each takes its slice, or its layers, of what all of them receive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from services.common import weights
from services.common.state import registry
from services.common.state.redis_client import connect
from tests.component.sampler.kept import check_kept
from tests.component.sampler.process import (
    BASE_MODEL,
    MODEL_ID,
    NEVER,
    Sampler,
    floats,
    incoming,
    ints,
    join,
    make_adapter,
    make_full,
    make_model,
    prompt,
    replica,
    request,
    sample,
    write_full,
    write_snapshot,
)
from tests.reference import Reference, check_logprobs
from tinsmith.internal.v1 import sampler_pb2, sampler_pb2_grpc
from tinsmith.v1 import sampling_pb2, types_pb2

pytestmark = [pytest.mark.heavy, pytest.mark.long]

STORED, FULL, BROADCAST, STRANGE, HALF, NEWER = 1, 2, 3, 4, 5, 6
SLICES, STAGES, BOTH = (2, 1), (1, 2), (2, 2)
"""(tensor parallel, pipeline parallel)"""


@pytest.fixture(params=[SLICES, STAGES, BOTH], ids=["slices", "stages", "both"])
def shape(request: pytest.FixtureRequest) -> tuple[int, int]:
    found: tuple[int, int] = request.param
    return found


@pytest.fixture
async def sampler(shape: tuple[int, int], tmp_path: Path) -> AsyncIterator[Sampler]:
    # A head that is the embedding is there on the first and on the last stage.
    model_dir = make_model(tmp_path / "model", tied=shape == STAGES)
    options = ("--tensor-parallel-size", str(shape[0]), "--pipeline-parallel-size", str(shape[1]))
    # Prompts are computed in several steps.
    options += ("--max-sequences", "16", "--max-batched-tokens", "64")
    with replica(tmp_path, model_dir, *options, "--max-loras", "2", "--kv-cache-gib", "0.25") as started:
        started.store_adapter(STORED)
        # Layers are 0 and 1.
        strange = {
            name.replace("layers.1", "layers.2"): one for name, one in make_adapter(STRANGE, 8).items()
        }
        write_snapshot(started.stored(STRANGE), strange, 8)
        started.store_full(FULL)
        started.store_full(NEWER)
        # The last stage alone would miss it.
        half = {name: one for name, one in make_full(model_dir, FULL).items() if name != "model.norm.weight"}
        write_full(started.stored(HALF), model_dir, half)
        yield started


async def check(
    stub: sampler_pb2_grpc.SamplerServiceStub, version: int, judge: Reference, length: int = 150
) -> None:
    """Scores of the prompt and of what is sampled are the reference's."""
    result = await sample(stub, request(prompt(version, length), version, scores=True, max_tokens=12))
    sequence = result.sequences[0]
    expected = judge.sequence_logprobs(prompt(version, length) + ints(sequence.tokens))
    found = torch.cat([floats(result.prompt_logprobs)[1:], floats(sequence.logprobs)])
    check_logprobs(found, expected)


async def test_several_workers_answer_as_the_reference_from_store_and_from_wire(
    sampler: Sampler, shape: tuple[int, int], tmp_path: Path
) -> None:
    workers = shape[0] * shape[1]
    stored = sampler.stored(STORED)
    async with sampler.client() as stub:
        await check(stub, 0, Reference(sampler.model_dir))
        await check(stub, STORED, Reference(sampler.model_dir, stored))
        group = await join(stub, sampler, epoch=1, workers=workers)
        tensors = make_adapter(BROADCAST, 16)
        buffer, specs = weights.pack(tensors)
        sent = asyncio.create_task(
            asyncio.to_thread(group.broadcast_buckets, buffer.split(weights.BUCKET_BYTES), 120)
        )
        await stub.ReceiveSnapshot(incoming(1, BROADCAST, 16, buffer, specs), timeout=150)
        await sent
        arrived = write_snapshot(tmp_path / "peft", tensors, 16)
        await check(stub, BROADCAST, Reference(sampler.model_dir, arrived))
        for version, why in ((STRANGE, "layers.2"), (HALF, "norm")):
            refused = await stub.Sample(request(prompt(1, 5), version), timeout=120)
            assert refused.error.category == types_pb2.ERROR_CATEGORY_USER and why in refused.error.message
        await check(stub, FULL, Reference(sampler.stored(FULL)))
        await check(stub, STORED, Reference(sampler.model_dir, stored))
        await _check_together(stub)
        judges = {
            STORED: Reference(sampler.model_dir, stored),
            BROADCAST: Reference(sampler.model_dir, arrived),
        }
        await _check_kept(stub, judges)
        fulls = {each: Reference(sampler.stored(each)) for each in (FULL, NEWER)}
        await _check_kept(stub, fulls)
        group.abort()
    client = connect(sampler.redis_url)
    (record,) = await registry.live(client, "sampler")
    await client.aclose()
    assert (record.base_model, record.world_size, record.pipeline_stages) == (BASE_MODEL, workers, shape[1])


async def _check_together(stub: sampler_pb2_grpc.SamplerServiceStub) -> None:
    """Requests that share steps, of which a pipeline computes several at once, sample what they do alone."""

    def asked() -> list[sampler_pb2.SampleRequest]:
        every = [
            request(
                prompt(seed, 5 + 30 * seed),
                (0, STORED, BROADCAST)[seed % 3],
                n=2,
                seed=seed,
                max_tokens=30,
                stop=NEVER,
                frequency_penalty=0.5,
            )
            for seed in range(9)
        ]
        every[0].params.constraint.regex = "(ab|ba|a){12}"
        every[0].params.stop.CopyFrom(sampling_pb2.StopCondition(model_eos={}))
        return every

    together = await asyncio.gather(*(sample(stub, wanted) for wanted in asked()))
    alone = [await sample(stub, wanted) for wanted in asked()]
    for one, other in zip(together, alone, strict=True):
        assert [ints(found.tokens) for found in one.sequences] == [
            ints(found.tokens) for found in other.sequences
        ]


async def _check_kept(stub: sampler_pb2_grpc.SamplerServiceStub, judges: dict[int, Reference]) -> None:
    """Sequences that go on with other weights keep their keys and values on all workers."""
    old, new = judges
    tokens = prompt(9, 20)
    wanted = request(tokens, old, n=2, max_tokens=400, stop=NEVER, seed=2)
    wanted.moves = wanted.keeps_kv = True
    asked = sampler_pb2.StreamSampleRequest(sample=wanted)
    to = sampler_pb2.Snapshot(model_id=MODEL_ID, version=new)
    move: sampler_pb2.MoveSampleRequest | None = sampler_pb2.MoveSampleRequest(
        request_id=wanted.request_id, snapshot=to
    )
    last = None
    async for told in stub.StreamSample(asked, timeout=240):
        if told.WhichOneof("kind") == "last":
            last = told.last
        elif move is not None:
            await stub.MoveSample(move, timeout=60)
            move = None
    assert last is not None
    for sequence in last.result.sequences:
        assert [(span.version, span.kv_kept) for span in sequence.versions] == [
            (old, False),
            (new, True),
        ]
        check_kept(judges.__getitem__, tokens, sequence)
