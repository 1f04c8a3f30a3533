"""A sampler without room for all that it has begun: vLLM gives sequences up and begins them again."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.component.sampler.kept import check_kept
from tests.component.sampler.process import (
    MODEL_ID,
    NEVER,
    Sampler,
    floats,
    ints,
    make_model,
    prompt,
    replica,
    request,
    sample,
)
from tests.reference import Reference, check_logprobs
from tinsmith.internal.v1 import sampler_pb2, sampler_pb2_grpc
from tinsmith.v1 import sampling_pb2

pytestmark = pytest.mark.heavy

ADAPTER, NEWER, MANY = 1, 2, 5
FULL, NEWER_FULL = 11, 12


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sampler]:
    """A sampler with keys and values for 800 tokens."""
    directory = tmp_path_factory.mktemp("small")
    model_dir = make_model(directory / "model", tied=True)
    with replica(directory, model_dir, "--kv-cache-gib", "0.0005", "--max-context", "400") as started:
        for version in (ADAPTER, NEWER):
            started.store_adapter(version)
        for version in (FULL, NEWER_FULL):
            started.store_full(version)
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
    async with small.client() as stub:
        together = await asyncio.gather(*(sample(stub, wanted) for wanted in asked()))
        assert preempted(small) > 0
        alone = [await sample(stub, wanted) for wanted in asked()]
    for wanted, result, single in zip(asked(), together, alone, strict=True):
        (made,) = result.sequences
        assert ints(made.tokens) == ints(single.sequences[0].tokens)
        tokens = ints(wanted.prompt)
        expected = models[wanted.snapshot.version].sequence_logprobs(tokens + ints(made.tokens))
        found = torch.cat([floats(result.prompt_logprobs)[1:], floats(made.logprobs)])
        check_logprobs(found, expected)


@pytest.mark.parametrize(("old", "new"), [(ADAPTER, NEWER), (FULL, NEWER_FULL)])
async def test_what_had_moved_with_its_keys_and_values_and_was_begun_again_says_from_where_on_they_are_new(
    small: Sampler, old: int, new: int
) -> None:
    stored = {each: snapshot(small, each) for each in (old, new)}
    judges = {
        each: Reference(small.model_dir, path) if each in (ADAPTER, NEWER) else Reference(path)
        for each, path in stored.items()
    }
    wanted, begun_again = [(old, False), (new, True), (new, False)], list[list[tuple[int, bool]]]()
    async with small.client() as stub:
        if old == ADAPTER:
            await sample(stub, request(prompt(1, 3), new, max_tokens=1))
        for _ in range(10):
            results = await moved(stub, old, new)
            for tokens, sequence in results:
                check_kept(judges.__getitem__, tokens, sequence)
                spans = [(span.version, span.kv_kept) for span in sequence.versions]
                begun_again += [spans] if (new, False) in spans[1:] else []
            if wanted in (spans[:3] for spans in begun_again):
                break
        else:
            raise AssertionError(f"none was given up behind its change: {begun_again}")
    assert preempted(small) > 0


async def moved(
    stub: sampler_pb2_grpc.SamplerServiceStub, old: int, new: int
) -> list[tuple[list[int], sampling_pb2.SampledSequence]]:
    """Prompts, and what was made of each by two versions; the second comes with the first token of any."""
    asked = []
    for index in range(MANY):
        tokens = prompt(50 + index, 40 + index)
        asked.append(request(tokens, old, seed=index, max_tokens=220, stop=NEVER))
        asked[-1].moves = asked[-1].keeps_kv = True
    to = sampler_pb2.Snapshot(model_id=MODEL_ID, version=new)

    async def followed(wanted: sampler_pb2.SampleRequest) -> sampling_pb2.SampledSequence:
        last = sampler_pb2.SampleResponse()
        async for told in stub.StreamSample(sampler_pb2.StreamSampleRequest(sample=wanted), timeout=240):
            if told.WhichOneof("kind") == "last":
                last = told.last
                continue
            for each in asked:
                # What it has already moves it no further.
                move = sampler_pb2.MoveSampleRequest(request_id=each.request_id, snapshot=to)
                await stub.MoveSample(move, timeout=60)
        (sequence,) = last.result.sequences
        return sequence

    made = await asyncio.gather(*map(followed, asked))
    return [(ints(wanted.prompt), sequence) for wanted, sequence in zip(asked, made, strict=True)]


def snapshot(sampler: Sampler, version: int = ADAPTER) -> Path:
    return sampler.stored(version)
