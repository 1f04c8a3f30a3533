"""Chats as the `openai` package sees them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.unit.gateway.edge.talking import ALICE, BASE, CONTEXT, END, Says, Talking

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
TIME: Any = {"type": "function", "function": {"name": "time"}}


@pytest.fixture
async def client(talks: Talking) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{talks.url}/v1", api_key=ALICE, max_retries=0) as made:
        yield made


def says(talks: Talking, *texts: Says) -> None:
    talks.sampler.script = lambda request: texts


async def test_a_conversation_goes_through_the_models_own_template(
    talks: Talking, client: openai.AsyncOpenAI
) -> None:
    says(talks, Says(f"I am well.{END}"))
    messages: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "there"}]},
        {"role": "assistant", "content": "Hi!"},
        *HELLO,
    ]
    answer = await client.chat.completions.create(model=BASE, messages=messages, max_completion_tokens=9)
    assert talks.sampler.prompt() == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi\nthere<|im_end|>\n"
        "<|im_start|>assistant\nHi!<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "I am well.")
    assert (choice.finish_reason, choice.message.tool_calls, choice.logprobs) == ("stop", None, None)
    assert talks.sampler.asked[0].params.max_tokens == 9
    assert not talks.sampler.asked[0].HasField("constraint")
    assert answer.system_fingerprint == BASE


async def test_without_a_limit_an_answer_may_take_the_whole_context(
    talks: Talking, client: openai.AsyncOpenAI
) -> None:
    await client.chat.completions.create(model=BASE, messages=HELLO)
    # What an answer may take of the gateway's memory is more than any context here.
    asked = talks.sampler.asked[0]
    assert asked.params.max_tokens == CONTEXT - asked.prompt.shape[0]


async def test_several_answers_come_with_their_log_probabilities(
    talks: Talking, client: openai.AsyncOpenAI
) -> None:
    says(talks, Says(f"one{END}"), Says("two ü", stopped=False))
    answer = await client.chat.completions.create(
        model=BASE, messages=HELLO, n=2, logprobs=True, top_logprobs=3
    )
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "length"]
    for choice, text in zip(answer.choices, ["one", "two ü"], strict=True):
        assert choice.message.content == text
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert len(choice.logprobs.content) == talks.sampler.count(text)
        for place, token in enumerate(choice.logprobs.content):
            assert token.logprob == -0.5 * place
            assert len(token.top_logprobs) == 3
            assert token.bytes is None or bytes(token.bytes).decode() == token.token


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_of_tools_are_read_out_of_what_is_said(
    talks: Talking, client: openai.AsyncOpenAI, stream: bool
) -> None:
    says(talks, Says(f"I look.\n{CALL}\n{CALL}{END}"))
    asked: dict[str, Any] = {"model": BASE, "messages": HELLO, "tools": [WEATHER, TIME]}
    if stream:
        async with client.chat.completions.stream(**asked) as events:
            answer: Any = await events.get_final_completion()
    else:
        answer = await client.chat.completions.create(**asked)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look.\n"
    calls = choice.message.tool_calls
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("weather", {"city": "Köln"})
    ] * 2
    assert len({call.id for call in calls}) == 2
    shown = talks.sampler.prompt().split("<tools>\n")[1].split("\n</tools>")[0].split("\n")
    assert [json.loads(tool)["function"]["name"] for tool in shown] == ["weather", "time"]
    assert not talks.sampler.asked[0].HasField("constraint"), "the model is free to call or not"


async def test_an_answer_with_calls_goes_back_with_what_they_came_to(
    talks: Talking, client: openai.AsyncOpenAI
) -> None:
    says(talks, Says(f"{CALL}{END}"))
    answer = await client.chat.completions.create(model=BASE, messages=HELLO, tools=[WEATHER])
    message = answer.choices[0].message
    assert message.content is None
    assert message.tool_calls is not None
    says(talks, Says(f"It rains.{END}"))
    back: list[Any] = [
        *HELLO,
        message.model_dump(),
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"},
    ]
    await client.chat.completions.create(model=BASE, messages=back, tools=[WEATHER])
    assert f"{CALL}<|im_end|>" in talks.sampler.prompt()
    assert "<|im_start|>tool\nrain<|im_end|>" in talks.sampler.prompt()


@pytest.mark.parametrize(
    ("fields", "kind", "names"),
    [
        ({"tool_choice": "required"}, "tags_with_separator", ["weather", "time"]),
        (
            {"tool_choice": {"type": "function", "function": {"name": "time"}}},
            "tags_with_separator",
            ["time"],
        ),
        ({"parallel_tool_calls": False}, "triggered_tags", ["weather", "time"]),
    ],
)
async def test_a_choice_of_tools_constrains_what_is_generated(
    talks: Talking, client: openai.AsyncOpenAI, fields: dict, kind: str, names: list[str]
) -> None:
    says(talks, Says(f"{CALL}{END}"))
    await client.chat.completions.create(model=BASE, messages=HELLO, tools=[WEATHER, TIME], **fields)
    form = json.loads(talks.sampler.asked[0].constraint.structural_tag)["format"]
    assert form["type"] == kind
    assert [tag["begin"].split('"')[3] for tag in form["tags"]] == names
    assert form["stop_after_first"] == ("parallel_tool_calls" in fields)


async def test_without_the_choice_of_a_tool_none_is_shown_and_nothing_is_read(
    talks: Talking, client: openai.AsyncOpenAI
) -> None:
    says(talks, Says(f"{CALL}{END}"))
    answer = await client.chat.completions.create(
        model=BASE, messages=HELLO, tools=[WEATHER], tool_choice="none"
    )
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (CALL, "stop")
    assert "<tools>" not in talks.sampler.prompt()


async def test_an_answer_is_constrained_by_its_schema(talks: Talking, client: openai.AsyncOpenAI) -> None:
    class Place(BaseModel):
        city: str

    says(talks, Says('{"city": "Köln"}' + END))
    answer = await client.chat.completions.parse(model=BASE, messages=HELLO, response_format=Place)
    assert answer.choices[0].message.parsed == Place(city="Köln")
    schema = json.loads(talks.sampler.asked[0].constraint.json_schema)
    assert schema["properties"] == {"city": {"title": "City", "type": "string"}}
    await client.chat.completions.create(model=BASE, messages=HELLO, response_format={"type": "json_object"})
    assert json.loads(talks.sampler.asked[1].constraint.json_schema) == {"type": "object"}


async def test_a_stream_tells_what_is_said_while_it_is_said(
    talks: Talking, client: openai.AsyncOpenAI
) -> None:
    says(talks, Says(f"one two three four{END}"), Says(f"five six seven{END}"))
    talks.sampler.half.clear()
    texts: list[str] = ["", ""]
    tokens: list[list[str]] = [[], []]
    reasons: list[str | None] = [None, None]
    usage = None
    stream = await client.chat.completions.create(
        model=BASE,
        messages=HELLO,
        n=2,
        stream=True,
        logprobs=True,
        stream_options={"include_usage": True},
    )
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason
            if choice.logprobs is not None:
                tokens[choice.index] += [token.token for token in choice.logprobs.content or ()]
        if all(texts) and not talks.sampler.half.is_set():
            assert reasons == [None, None]
            talks.sampler.half.set()
    assert texts == ["one two three four", "five six seven"]
    assert ["".join(found) for found in tokens] == texts
    assert reasons == ["stop", "stop"]
    assert usage is not None
    assert usage.completion_tokens == sum(talks.sampler.count(text + END) for text in texts)


async def test_a_body_takes_memory_only_until_its_prompt_is_made(
    talks: Talking, client: openai.AsyncOpenAI
) -> None:
    says(talks, Says(f"one two three four{END}"))
    talks.sampler.gate.clear()
    budget = talks.gateway.application.budget
    answer = asyncio.create_task(client.chat.completions.create(model=BASE, messages=HELLO))
    async with asyncio.timeout(60):
        await talks.sampler.arrived.wait()
    assert (budget._small.held_by("alice"), budget._large.held_by("alice")) == (0, 0)
    talks.sampler.gate.set()
    assert (await answer).choices[0].message.content == "one two three four"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": []}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "image",
        ),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"store": True}, "store"),
        ({"metadata": {"a": "b"}}, "metadata"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": [WEATHER], "response_format": {"type": "json_object"}}, "both"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, "enable_thinking"),
        ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "messages"),
        ({"extra_body": {"repetition_penalty": 0}}, "repetition_penalty"),
        ({"messages": [{"role": "user", "content": "x " * 1600}]}, "context length"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"enum": ["x" * 70000]}},
                }
            },
            "schemas have",
        ),
    ],
)
async def test_what_is_not_served_is_refused_with_its_name(
    client: openai.AsyncOpenAI, fields: dict, named: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=named):
        await client.chat.completions.create(**{"model": BASE, "messages": HELLO, **fields})
