"""A sampler that drafts tokens against one that does not, and against transformers + PEFT in float32."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from services.common.state import registry
from services.common.state.redis_client import connect
from tests.component.sampler.process import (
    CONTEXT,
    NEVER,
    Sampler,
    floats,
    ints,
    prompt,
    replica,
    request,
    sample,
)
from tests.component.sampler.test_sampled_logprobs import check_sampled_logprobs
from tests.reference import Reference, check_logprobs
from tinsmith.internal.v1 import sampler_pb2, sampler_pb2_grpc
from tinsmith.v1 import sampling_pb2

pytestmark = [pytest.mark.heavy, pytest.mark.long]

DRAFT, NGRAM = 4, 5
ADAPTER, FULL = 1, 9
STOP = sampling_pb2.STOP_REASON_STOP
LETTERS = (64, 65)
"""a and b. Of two tokens what was sampled comes again and again, and half of all drafts hold."""


@pytest.fixture(scope="module")
def drafting(sampler: Sampler, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sampler]:
    """A sampler of the same model that drafts."""
    with started_to_draft(sampler, tmp_path_factory.mktemp("drafting")) as started:
        yield started


@contextmanager
def started_to_draft(sampler: Sampler, directory: Path, *more: str) -> Iterator[Sampler]:
    options = ("--speculative-ngram-tokens", str(DRAFT), "--max-loras", "2", "--max-sequences", "64", *more)
    with replica(directory, sampler.model_dir, *options) as started:
        started.store_adapter(ADAPTER)
        started.store_full(FULL)
        yield started


@pytest.fixture
async def drafts(drafting: Sampler) -> AsyncIterator[sampler_pb2_grpc.SamplerServiceStub]:
    async with drafting.client() as stub:
        yield stub


def lettered(
    wanted: sampler_pb2.SampleRequest, letters: tuple[int, ...] = LETTERS
) -> sampler_pb2.SampleRequest:
    for letter in letters:
        wanted.params.logit_bias.add(token_id=letter, bias=100.0)
    return wanted


def asked() -> list[sampler_pb2.SampleRequest]:
    """Seeded requests, with ids of their own, that share steps and are steered in every way."""
    common: dict[str, object] = {"max_tokens": 60, "stop": NEVER}
    every = [
        request(prompt(1, 20), n=3, seed=11, **common),
        lettered(request(prompt(2, 9), n=4, seed=2**64 - 2, **common)),
        lettered(request(prompt(3, 12), ADAPTER, n=4, seed=5, temperature=0.6, **common)),
        lettered(request(prompt(4, 6), seed=6, min_p=0.4, **common), (64, 65, 66, 67)),
        lettered(request(prompt(5, 7), n=2, seed=7, top_k=3, top_p=0.8, **common), (64, 65, 66, 67)),
        lettered(request(prompt(6, 7), seed=8, frequency_penalty=0.2, presence_penalty=-1.0, **common)),
        lettered(request(prompt(6, 7), seed=9, repetition_penalty=1.3, **common)),
        lettered(request(prompt(7, 7), seed=10, bad_words=["aba"], **common)),
        request(prompt(8, 5) * 6, temperature=0.0, **common),
        request(prompt(9, 300), ADAPTER, temperature=0.0, scores=True, topk=3, **common),
    ]
    every.append(
        request(prompt(10, 12), seed=12, max_tokens=40, stop=sampling_pb2.StopCondition(model_eos={}))
    )
    every[-1].params.constraint.regex = "(ab|ba|a){12}"
    for wanted in every:
        wanted.topk_sample_logprobs = 2
    return every


def tokens_of(result: sampling_pb2.SampleResult) -> list[list[int]]:
    return [ints(sequence.tokens) for sequence in result.sequences]


def accepted(drafting: Sampler) -> float:
    """Drafted tokens that held, since it started."""
    with urllib.request.urlopen(f"http://127.0.0.1:{drafting.metrics_port}/metrics", timeout=30) as reply:
        text = reply.read().decode()
    (count,) = re.findall(r"^vllm:spec_decode_num_accepted_tokens_total\S* (\S+)$", text, re.MULTILINE)
    return float(count)


async def test_tokens_of_seeds_and_greedy_ones_are_those_that_come_without_drafts(
    stub, drafts, drafting: Sampler
) -> None:
    before = accepted(drafting)
    together = await asyncio.gather(*(sample(drafts, wanted) for wanted in asked()))
    alone = [await sample(drafts, wanted) for wanted in asked()]
    plain = await asyncio.gather(*(sample(stub, wanted) for wanted in asked()))
    for index, results in enumerate(zip(together, alone, plain, strict=True)):
        found = [tokens_of(result) for result in results]
        assert found[0] == found[1] == found[2], index
    assert accepted(drafting) > before + 400


async def test_log_probabilities_are_the_references_whatever_is_drafted(drafts, judge) -> None:
    await check_log_probabilities(drafts, judge)


async def test_what_tokens_are_drawn_from_is_told_whatever_is_drafted(
    drafts, judge, sampler: Sampler
) -> None:
    await check_sampled_logprobs(drafts, judge, sampler.model_dir)


async def test_two_workers_that_draft_sample_what_one_does_that_does_not(
    stub, judge, sampler: Sampler, tmp_path: Path
) -> None:
    options = ("--tensor-parallel-size", "2", "--kv-cache-gib", "0.25")
    with started_to_draft(sampler, tmp_path, *options) as wide:
        async with wide.client() as drafts:
            found = await asyncio.gather(*(sample(drafts, wanted) for wanted in asked()))
            plain = await asyncio.gather(*(sample(stub, wanted) for wanted in asked()))
            for index, (one, other) in enumerate(zip(found, plain, strict=True)):
                assert tokens_of(one) == tokens_of(other), index
            await check_log_probabilities(drafts, judge)
        assert accepted(wide) > 200


async def check_log_probabilities(drafts: sampler_pb2_grpc.SamplerServiceStub, judge) -> None:
    wanted = asked()
    results = await asyncio.gather(*(sample(drafts, each) for each in wanted))
    for each, result in zip(wanted, results, strict=True):
        start = len(ints(each.prompt))
        model = judge(each.snapshot.version)
        for sequence in result.sequences:
            whole = ints(each.prompt) + ints(sequence.tokens)
            own = model.distribution(whole)[start - 1 : -1].detach()
            sampled = own.gather(1, torch.tensor(ints(sequence.tokens))[:, None])[:, 0]
            check_logprobs(floats(sequence.logprobs), sampled)
            likely = floats(sequence.topk_logprobs.logprobs).view(-1, 2)
            check_logprobs(likely, own.topk(2).values)
        if each.prompt_logprobs:
            expected = model.sequence_logprobs(ints(each.prompt))
            check_logprobs(floats(result.prompt_logprobs)[1:], expected)


async def test_without_a_seed_a_draft_makes_no_token_more_likely(drafts, judge) -> None:
    result = await sample(drafts, lettered(request(prompt(11, 8), n=64, max_tokens=80, stop=NEVER)))
    model, surplus, variance, guesses = judge(0), 0.0, 0.0, 0
    for tokens in tokens_of(result):
        whole = prompt(11, 8) + tokens
        chances = model.distribution(whole).detach()[:, list(LETTERS)].softmax(-1)
        for place in range(8, len(whole)):
            if (draft := _looked_up(whole[:place])) in LETTERS:
                chance = float(chances[place - 1, LETTERS.index(draft)])
                surplus += (whole[place] == draft) - chance
                variance += chance * (1 - chance)
                guesses += 1
    assert guesses > 2000
    assert abs(surplus) < 4.5 * variance**0.5


def _looked_up(tokens: list[int]) -> int | None:
    """What followed when the last few tokens came first."""
    last = tokens[-NGRAM:]
    for start in range(len(tokens) - NGRAM):
        if tokens[start : start + NGRAM] == last:
            return tokens[start + NGRAM]
    return None


async def test_a_sequence_ends_where_its_stop_string_does_and_at_the_end_of_the_context(
    stub, drafts, drafting: Sampler
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(drafting.model_dir)
    by_string = sampling_pb2.StopCondition(strings={"values": ["bbab"]})
    result = await sample(
        drafts, lettered(request(prompt(12, 9), n=16, seed=1, max_tokens=200, stop=by_string), LETTERS)
    )
    for sequence in result.sequences:
        tokens = ints(sequence.tokens)
        text, shorter = tokenizer.decode(tokens), tokenizer.decode(tokens[:-1])
        assert sequence.stop_reason == STOP and "bbab" in text and "bbab" not in shorter
        assert len(floats(sequence.logprobs)) == len(tokens)
    wanted = [lettered(request(prompt(13, CONTEXT - 30), n=4, seed=3, stop=NEVER)) for _ in range(2)]
    for each in wanted:
        each.params.ClearField("max_tokens")
    ends = [tokens_of(await sample(side, each)) for side, each in zip((stub, drafts), wanted, strict=True)]
    assert ends[0] == ends[1] and {len(tokens) for tokens in ends[1]} == {30}


async def test_what_was_kept_of_a_cancelled_sample_is_its_beginning(stub, drafts) -> None:
    wanted = lettered(request(prompt(14, 8), n=2, seed=4, max_tokens=480, stop=NEVER))
    call = drafts.StreamSample(sampler_pb2.StreamSampleRequest(sample=wanted), timeout=120)
    told: dict[int, list[int]] = {0: [], 1: []}
    kept = None
    async for answer in call:
        if answer.WhichOneof("kind") == "last":
            kept = answer.last.result
            break
        for part in answer.new_tokens.sequences:
            told[part.index] += ints(part.added.tokens)
        if min(map(len, told.values())) > 40:
            end = sampler_pb2.EndSampleRequest(request_id=wanted.request_id, keep=True)
            await drafts.EndSample(end, timeout=30)
    assert kept is not None
    whole = lettered(request(prompt(14, 8), n=2, seed=4, max_tokens=480, stop=NEVER))
    expected = tokens_of(await sample(stub, whole))
    for index, tokens in enumerate(tokens_of(kept)):
        assert len(tokens) > 40 and tokens == expected[index][: len(tokens)]
        assert tokens[: len(told[index])] == told[index]
    assert {sequence.stop_reason for sequence in kept.sequences} == {sampling_pb2.STOP_REASON_CANCELLED}


async def test_a_full_model_and_the_base_model_after_it_answer_as_the_reference(
    drafts, drafting: Sampler, judge
) -> None:
    full = Reference(drafting.stored(FULL))
    for version, model in ((FULL, full), (0, judge(0))):
        tokens = prompt(15, 6) * 3
        result = await sample(
            drafts, lettered(request(tokens, version, max_tokens=40, stop=NEVER, seed=2, scores=True))
        )
        (made,) = result.sequences
        expected = model.sequence_logprobs(tokens + ints(made.tokens))
        found = torch.cat([floats(result.prompt_logprobs)[1:], floats(made.logprobs)])
        check_logprobs(found, expected)


async def test_how_much_it_drafts_is_announced(drafting: Sampler) -> None:
    client = connect(drafting.redis_url)
    (record,) = await registry.live(client, "sampler")
    await client.aclose()
    assert record.speculative_ngram_tokens == DRAFT
