"""Completions as the `openai` package sees them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import openai
import pytest

from services.common.contract import steering
from services.common.contract.errors import InvalidRequest
from services.common.contract.steering import Steering
from services.gateway.access.answer_room import AnswerAccount, AnswerRoom
from services.gateway.inference.question import Question
from tests.unit.gateway.edge.talking import ALICE, BASE, END, Says, Talking
from tinsmith.internal.v1 import sampler_pb2


@pytest.fixture
async def client(talks: Talking) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{talks.url}/oai/api/v1", api_key=ALICE, max_retries=0) as made:
        yield made


def says(talks: Talking, *texts: Says) -> None:
    talks.sampler.script = lambda request: texts


async def test_a_text_is_continued(talks: Talking, client: openai.AsyncOpenAI) -> None:
    says(talks, Says(f" fox jumps{END}"))
    answer = await client.completions.create(model=BASE, prompt="The quick brown", max_tokens=7, seed=3)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == (" fox jumps", "stop", None)
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.completion_tokens == talks.sampler.count(f" fox jumps{END}")
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert talks.sampler.prompt() == "The quick brown"
    asked = talks.sampler.asked[0]
    assert (asked.params.max_tokens, asked.params.seed, asked.params.top_k) == (7, 3, -1)
    assert asked.params.stop.WhichOneof("kind") == "model_eos"


async def test_how_to_sample_reaches_the_sampler_as_it_was_sent(
    talks: Talking, client: openai.AsyncOpenAI
) -> None:
    await client.completions.create(
        model=BASE, prompt=[1, 2, 3], temperature=0.5, top_p=0.25, n=2, stop=["\n"], extra_body={"top_k": 9}
    )
    asked = talks.sampler.asked[0]
    assert np.frombuffer(asked.prompt.data, "<i4").tolist() == [1, 2, 3]
    assert (asked.params.temperature, asked.params.top_p, asked.params.top_k) == (0.5, 0.25, 9)
    assert (asked.num_samples, list(asked.params.stop.strings.values)) == (2, ["\n"])
    assert asked.params.max_tokens == 16, "what OpenAI generates when nothing is said"


async def test_what_changes_which_tokens_are_likely_reaches_the_sampler(
    talks: Talking, client: openai.AsyncOpenAI
) -> None:
    await client.completions.create(
        model=BASE,
        prompt=[1],
        frequency_penalty=-1.5,
        presence_penalty=0.5,
        logit_bias={"7": -100, "0": 2},
        extra_body={"min_p": 0.25, "repetition_penalty": 1.5},
    )
    asked = steering.from_pb(talks.sampler.asked[0].params)
    assert asked == Steering(0.25, -1.5, 0.5, 1.5, {7: -100, 0: 2})


async def test_several_prompts_and_samples_are_answered_in_their_order(
    talks: Talking, client: openai.AsyncOpenAI
) -> None:
    def script(request: object) -> list[Says]:
        return [Says(talks.sampler.prompt() + str(index)) for index in range(2)]

    talks.sampler.script = script
    answer = await client.completions.create(model=BASE, prompt=["a", "b", "c"], n=2, seed=10)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == ["a0", "a1", "b0", "b1", "c0", "c1"]
    seeds = {talks.sampler.prompt(i): asked.params.seed for i, asked in enumerate(talks.sampler.asked)}
    assert seeds == {"a": 10, "b": 12, "c": 14}


async def test_stop_strings_are_no_part_of_the_text_and_length_is_told(
    talks: Talking, client: openai.AsyncOpenAI
) -> None:
    says(talks, Says("one\n\ntwo"))
    answer = await client.completions.create(model=BASE, prompt="x", stop="\n\n")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("one", "stop")
    says(talks, Says("one two", stopped=False))
    answer = await client.completions.create(model=BASE, prompt="x")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("one two", "length")


async def test_tokens_come_with_their_log_probabilities(talks: Talking, client: openai.AsyncOpenAI) -> None:
    says(talks, Says(f"one two three{END}"))
    answer = await client.completions.create(model=BASE, prompt="x", logprobs=3)
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.tokens is not None and found.top_logprobs is not None
    assert "".join(found.tokens) == "one two three"
    assert found.token_logprobs == [-0.5 * place for place in range(len(found.tokens))]
    assert found.text_offset == [len("".join(found.tokens[:i])) for i in range(len(found.tokens))]
    assert all(len(top) == 3 for top in found.top_logprobs)
    assert talks.sampler.asked[0].topk_sample_logprobs == 3


async def test_an_echoed_prompt_is_scored(talks: Talking, client: openai.AsyncOpenAI) -> None:
    says(talks, Says("!", stopped=False))
    answer = await client.completions.create(model=BASE, prompt="one two", echo=True, logprobs=1)
    found = answer.choices[0].logprobs
    assert answer.choices[0].text == "one two!"
    assert found is not None
    assert found.tokens is not None and found.token_logprobs is not None and found.top_logprobs is not None
    assert "".join(found.tokens) == "one two!"
    assert (found.token_logprobs[0], found.top_logprobs[0]) == (None, None)
    assert found.token_logprobs[1:-1] == [-1.0 * i for i in range(1, len(found.tokens) - 1)]
    assert talks.sampler.asked[0].topk_prompt_logprobs == 1


async def test_a_stream_tells_text_while_it_is_generated(talks: Talking, client: openai.AsyncOpenAI) -> None:
    says(talks, Says(f"one two three four five{END}"), Says("six seven eight", stopped=False))
    talks.sampler.half.clear()
    stream = await client.completions.create(
        model=BASE, prompt="x", n=2, stream=True, logprobs=0, stream_options={"include_usage": True}
    )
    texts, reasons, tokens, usage = ["", ""], [None, None], [[], []], None
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
            tokens[choice.index] += choice.logprobs.tokens
            assert choice.logprobs.text_offset[:1] in ([], [len(texts[choice.index]) - len(choice.text)])
        if not talks.sampler.half.is_set() and all(texts):
            assert reasons == [None, None]
            talks.sampler.half.set()
        usage = chunk.usage or usage
    assert texts == ["one two three four five", "six seven eight"]
    assert ["".join(found) for found in tokens] == texts
    assert reasons == ["stop", "length"]
    assert usage is not None
    assert usage.completion_tokens == talks.sampler.count(texts[0] + END) + talks.sampler.count(texts[1])
    assert talks.sampler.asked[0].params.HasField("seed"), "another replica could not go on with it"


@pytest.mark.parametrize("room_for", [0, 2])
async def test_a_stream_without_room_for_more_has_the_rest_at_its_end(
    room_for: int, talks: Talking, client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(talks, Says(f"one two three four five{END}"))
    asked: list[int] = []

    def take_now(self: AnswerAccount, nbytes: int) -> bool:
        asked.append(nbytes)
        self.held += nbytes * (fits := len(asked) <= room_for)
        self._room._shares.add("alice", nbytes * fits)
        return fits

    monkeypatch.setattr(AnswerAccount, "take_now", take_now)
    stream = await client.completions.create(model=BASE, prompt="x", stream=True, logprobs=1)
    choices = [choice async for chunk in stream for choice in chunk.choices]
    assert "".join(choice.text for choice in choices) == "one two three four five"
    tokens = [token for choice in choices for token in choice.logprobs.tokens]
    assert "".join(tokens) == "one two three four five"
    assert len(asked) > room_for
    assert talks.gateway.application.inference._room.held == 0


async def test_an_answer_that_may_be_too_large_is_refused_before_it_is_sampled(
    talks: Talking, client: openai.AsyncOpenAI
) -> None:
    with pytest.raises(openai.BadRequestError, match="--memory-mib") as refused:
        await client.completions.create(model=BASE, prompt="x", n=64, max_tokens=10_000, logprobs=5)
    assert refused.value.code == "answer_too_large"
    assert talks.sampler.asked == []


async def test_without_max_tokens_no_more_is_generated_than_an_answer_has_room_for(
    talks: Talking, client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    inference = talks.gateway.application.inference
    # Room for one answer of some hundred tokens.
    monkeypatch.setattr(inference, "_room", AnswerRoom(2 * 64 * 8 * 3 * 200))
    most = 0

    def as_long_as_can_be(request: sampler_pb2.SampleRequest) -> list[Says]:
        nonlocal most
        most = request.params.max_tokens
        return [Says("a" * most, stopped=False)]

    talks.sampler.script = as_long_as_can_be
    message = [{"role": "user", "content": "x"}]
    for _ in range(2):
        answer = await client.chat.completions.create(
            model=BASE, messages=message, logprobs=True, top_logprobs=2
        )
        (choice,) = answer.choices
        assert choice.finish_reason == "length"
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert len(choice.logprobs.content) == most
    assert 100 < most < 200
    stream = await client.chat.completions.create(
        model=BASE, messages=message, logprobs=True, top_logprobs=2, stream=True
    )
    told = [chunk.choices[0] async for chunk in stream]
    assert told[-1].finish_reason == "length"
    assert sum(len(one.logprobs.content) for one in told if one.logprobs and one.logprobs.content) == most


async def test_questions_of_several_prompts_share_room_that_is_enough_for_one(
    talks: Talking, client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    inference, length = talks.gateway.application.inference, 200
    says(talks, Says("a" * length, stopped=False))
    question = Question([[1]] * 3, max_tokens=length)
    needed = question.times * sum(question.told_besides(prompt) + 8 * length for prompt in range(3))
    monkeypatch.setattr(inference, "_room", AnswerRoom(2 * needed))
    asked = (
        client.completions.create(model=BASE, prompt=["a", "b", "c"], max_tokens=length) for _ in range(4)
    )
    async with asyncio.timeout(60):
        answers = await asyncio.gather(*asked)
    for answer in answers:
        assert [one.text for one in answer.choices] == ["a" * length] * 3
    assert inference._room.held == 0


async def test_a_client_that_goes_away_ends_what_it_asked_for(talks: Talking) -> None:
    for stream in (False, True):
        talks.sampler.arrived.clear()
        talks.sampler.gate.clear()
        talks.sampler.half.clear()
        async with talks.http() as http:
            body = {"model": BASE, "prompt": "x", "stream": stream}
            asking = asyncio.create_task(http.post("/v1/completions", json=body))
            await talks.sampler.arrived.wait()
            asking.cancel()
        async with asyncio.timeout(60):
            await talks.sampler.gave_up.wait()
        talks.sampler.gave_up.clear()
    assert len(set(talks.sampler.ended)) == 2


async def test_a_stream_goes_on_after_the_loss_of_a_sampler_with_the_same_tokens(
    talks: Talking, client: openai.AsyncOpenAI
) -> None:
    says(talks, Says(f"one two three four five{END}"))
    talks.sampler.breaks = 1
    stream = await client.completions.create(model=BASE, prompt="x", stream=True)
    texts = [choice.text async for chunk in stream for choice in chunk.choices]
    assert "".join(texts) == "one two three four five"
    first, again = talks.sampler.asked
    assert (first.request_id, first.params.seed) == (again.request_id, again.params.seed)


async def test_a_stream_that_would_go_on_otherwise_than_it_began_fails(
    talks: Talking, client: openai.AsyncOpenAI
) -> None:
    talks.sampler.script = lambda request: [Says(f"{len(talks.sampler.asked)} and so on and on{END}")]
    talks.sampler.breaks = 1
    with pytest.raises(openai.APIError, match="same tokens"):
        async for _ in await client.completions.create(model=BASE, prompt="x", stream=True):
            pass


async def test_what_a_sample_fails_with_is_told_also_in_a_stream(
    talks: Talking, client: openai.AsyncOpenAI
) -> None:
    def script(request: object) -> list[Says]:
        raise InvalidRequest("the weights have diverged", "diverged")

    talks.sampler.script = script
    with pytest.raises(openai.BadRequestError, match="diverged") as whole:
        await client.completions.create(model=BASE, prompt="x")
    assert whole.value.code == "diverged"
    with pytest.raises(openai.APIError, match="diverged"):
        async for _ in await client.completions.create(model=BASE, prompt="x", stream=True):
            pass


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"logit_bias": {"five": 3}}, "token ids"),
        ({"logit_bias": {"5": 3, "05": 3}}, "twice"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"temperature": 3.0}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 0}, "num_samples"),
        ({"seed": -1}, "seed"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [[-1]]}, "token"),
        ({"prompt": [100000]}, "vocabulary"),
        ({"stop": [""]}, "stop"),
        ({"extra_body": {"min_p": 1.5}}, "min_p"),
        ({"model": "tinker://no/path"}, "checkpoint path"),
    ],
)
async def test_what_is_not_served_is_refused_with_its_name(
    client: openai.AsyncOpenAI, fields: dict, named: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=named):
        await client.completions.create(**{"model": BASE, "prompt": "x", **fields})


async def test_who_calls_and_what_is_served_is_told_in_openais_way(talks: Talking) -> None:
    for path in ("/oai/api/v1", "/v1"):
        async with openai.AsyncOpenAI(base_url=talks.url + path, api_key="tml-none") as stranger:
            with pytest.raises(openai.AuthenticationError) as refused:
                await stranger.models.list()
            assert refused.value.code == "invalid_api_key"
        async with openai.AsyncOpenAI(base_url=talks.url + path, api_key=ALICE, max_retries=0) as client:
            assert [model.id async for model in client.models.list()] == [BASE]
            assert (await client.models.retrieve(BASE)).id == BASE
            with pytest.raises(openai.NotFoundError) as absent:
                await client.models.retrieve("other")
            assert absent.value.code == "model_not_found"
            with pytest.raises(openai.NotFoundError):
                await client.completions.create(model="other", prompt="x")
    async with talks.http() as http:
        http.headers = {"x-api-key": ALICE}
        assert (await http.get("/v1/models")).status_code == 200
