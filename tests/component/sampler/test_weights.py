"""A sampler whose head computes in float32, and what becomes of it when it cannot get its weights back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from services.common.state import registry
from services.common.state.redis_client import connect
from tests.component.own_redis import redis_server
from tests.component.sampler.process import (
    VOCAB,
    Sampler,
    floats,
    launch,
    make_model,
    prompt,
    request,
    sample,
    wait_ready,
)

pytestmark = pytest.mark.heavy

OPTIONS = (
    "--dtype",
    "bfloat16",
    "--head-dtype",
    "float32",
    "--max-batched-tokens",
    "512",
    "--max-loras",
    "2",
)
LIKELY = 64


@pytest.fixture(scope="module")
def sampler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sampler]:
    directory = tmp_path_factory.mktemp("sampler")
    model_dir = make_model(directory / "model", tied=False)
    with redis_server(directory) as redis_url:
        started = launch(directory, model_dir, redis_url, *OPTIONS)
        try:
            yield wait_ready(started)
        finally:
            started.process.kill()
            started.process.wait()


def remove_weights(directory: Path) -> None:
    for file in directory.glob("*.safetensors"):
        file.unlink()


async def test_logits_of_a_bfloat16_model_have_the_bits_of_float32(sampler: Sampler) -> None:
    async with sampler.client() as stub:
        wanted = request(prompt(1, 20), max_tokens=8)
        wanted.topk_sample_logprobs = LIKELY
        (sequence,) = (await sample(stub, wanted)).sequences
    rows = floats(sequence.topk_logprobs.logprobs).reshape(-1, LIKELY)
    # So many of so few tokens lie close together: with the eight bits of bfloat16 many would be equal.
    assert VOCAB / LIKELY == 8
    assert min(row.unique().numel() for row in rows) >= LIKELY - 2


async def test_what_it_was_started_with_is_announced(sampler: Sampler) -> None:
    client = connect(sampler.redis_url)
    (record,) = await registry.live(client, "sampler")
    await client.aclose()
    assert (record.dtype, record.head_dtype, record.kv_cache_dtype) == ("bfloat16", "float32", "auto")
    assert (record.batched_tokens, record.adapter_slots) == (512, 2)


async def test_a_sampler_that_does_not_get_its_weights_back_leaves_the_registry_and_ends(
    sampler: Sampler,
) -> None:
    sampler.store_full(201)
    async with sampler.client() as stub:
        await sample(stub, request(prompt(2, 9), 201))
        remove_weights(sampler.model_dir)
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Sample(request(prompt(2, 9)), timeout=240)
    assert await asyncio.to_thread(sampler.process.wait, 120) == 1
    assert "weights are not sound" in sampler.log.read_text()
    client = connect(sampler.redis_url)
    assert await registry.live(client, "sampler") == []
    await client.aclose()
