"""A sampler without room for all that it has begun: vLLM gives sequences up and begins them again."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from services.common.process import rpc
from tests.component.sampler.process import (
    MODEL_ID,
    Sampler,
    floats,
    ints,
    make_adapter,
    make_model,
    prompt,
    replica,
    request,
    sample,
    write_snapshot,
)
from tests.reference import Reference
from tinsmith.internal.v1 import sampler_pb2, sampler_pb2_grpc
from tinsmith.v1 import sampling_pb2

pytestmark = pytest.mark.heavy

ADAPTER, MANY = 1, 5
NEVER = sampling_pb2.StopCondition(never=sampling_pb2.StopCondition.Never())


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sampler]:
    """A sampler with keys and values for 800 tokens."""
    directory = tmp_path_factory.mktemp("small")
    model_dir = make_model(directory / "model", tied=True)
    with replica(directory, model_dir, "--kv-cache-gib", "0.0005", "--max-context", "400") as started:
        write_snapshot(started.data_dir.snapshot(MODEL_ID, ADAPTER), make_adapter(ADAPTER, 8), 8)
        yield started


def asked() -> list[sampler_pb2.SampleRequest]:
    """More than fits, once they have grown: of the base model and of an adapter, in turn."""
    return [
        request(
            prompt(30 + index, 40 + index),
            index % 2 and ADAPTER,
            scores=True,
            topk=2,
            seed=index,
            max_tokens=220,
            stop=NEVER,
        )
        for index in range(MANY)
    ]


def preempted(sampler: Sampler) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{sampler.metrics_port}/metrics", timeout=30) as reply:
        text = reply.read().decode()
    (count,) = re.findall(r"^vllm:num_preemptions_total\S* (\S+)$", text, re.MULTILINE)
    return float(count)


async def test_what_was_begun_again_has_the_scores_and_the_tokens_that_it_has_alone(small: Sampler) -> None:
    models = {0: Reference(small.model_dir, None), ADAPTER: Reference(small.model_dir, snapshot(small))}
    async with rpc.channel(small.address) as channel:
        stub = sampler_pb2_grpc.SamplerServiceStub(channel)
        together = await asyncio.gather(*(sample(stub, wanted) for wanted in asked()))
        assert preempted(small) > 0
        alone = [await sample(stub, wanted) for wanted in asked()]
    for wanted, result, single in zip(asked(), together, alone, strict=True):
        (made,) = result.sequences
        assert ints(made.tokens) == ints(single.sequences[0].tokens)
        tokens = ints(wanted.prompt)
        expected = models[wanted.snapshot.version].sequence_logprobs(tokens + ints(made.tokens))
        found = torch.cat([floats(result.prompt_logprobs)[1:], floats(made.logprobs)])
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=2e-5)


def snapshot(sampler: Sampler) -> Path:
    return sampler.data_dir.snapshot(MODEL_ID, ADAPTER)
