"""A grammar that takes longer to make than an engine may do nothing, or that keeps its steps, fails its
request, and not the engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest
from transformers import AutoTokenizer

from tests.component.sampler.process import NEVER, Sampler, make_model, prompt, replica, request, sample
from tinsmith.v1 import sampling_pb2

pytestmark = pytest.mark.heavy

# It is read in a tenth of a second, and compiled in a minute.
NAMES = {f"p{number}": {"type": "integer"} for number in range(300)}
SLOW = json.dumps({"type": "object", "properties": NAMES, "minProperties": 150})
# What may come next takes twice as long to tell with every token: after twenty of them minutes.
DOUBLING = "((.{0,30}){0,60}){0,9}"


@pytest.fixture(scope="module")
def sampler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sampler]:
    directory = tmp_path_factory.mktemp("slow")
    with replica(directory, make_model(directory / "model", tied=True), "--stall-seconds", "10") as started:
        yield started


async def test_a_grammar_that_keeps_steps_fails_alone_and_what_runs_beside_it_goes_on(
    sampler: Sampler,
) -> None:
    (letter,) = AutoTokenizer.from_pretrained(sampler.model_dir).encode("a")
    async with sampler.client() as stub:
        wanted = request(prompt(1, 4), n=4, stop=sampling_pb2.StopCondition(model_eos={}), max_tokens=60)
        wanted.constraint.regex = DOUBLING
        wanted.params.logit_bias.add(token_id=letter, bias=100)
        doubling = asyncio.ensure_future(stub.Sample(wanted, timeout=60))
        for _ in range(3):
            await sample(stub, request(prompt(1, 4), max_tokens=100, stop=NEVER))
        response = await doubling
        assert response.error.code == "constraint_too_large"
        assert "takes too long to tell which tokens" in response.error.message


async def test_an_engine_that_waits_for_a_grammar_alone_is_not_stuck(sampler: Sampler) -> None:
    async with sampler.client() as stub:
        wanted = request(prompt(1, 4), stop=sampling_pb2.StopCondition(model_eos={}))
        wanted.constraint.json_schema = SLOW
        response = await stub.Sample(wanted, timeout=60)
        assert response.error.code == "constraint_too_large"
        await sample(stub, request(prompt(1, 4)))


async def test_an_ordinary_constraint_is_answered_soon_beside_several_that_take_long(
    sampler: Sampler,
) -> None:
    async with sampler.client() as stub:
        stop = sampling_pb2.StopCondition(model_eos={})
        slow = []
        for number in range(3):
            wanted = request(prompt(1, 4), stop=stop)
            wanted.constraint.json_schema = SLOW.replace('"p1"', f'"q{number}"')
            slow.append(asyncio.ensure_future(stub.Sample(wanted, timeout=60)))
        await asyncio.sleep(1)
        ordinary = request(prompt(1, 4), stop=stop, max_tokens=20)
        ordinary.constraint.regex = "[ab]{3}"
        response = await asyncio.wait_for(stub.Sample(ordinary), 8)
        assert response.WhichOneof("kind") == "result", response.error
        for each in slow:
            assert (await each).error.code == "constraint_too_large"
        # Those that were given up are at it yet.
        await asyncio.sleep(10)
        ordinary.request_id = "another"
        assert (await asyncio.wait_for(stub.Sample(ordinary), 8)).WhichOneof("kind") == "result"
