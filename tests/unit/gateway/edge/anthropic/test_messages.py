"""Messages as the `anthropic` package sees them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import msgspec
import pytest
from anthropic.types import message_count_tokens_params, message_create_params

from services.common.contract.errors import InvalidRequest
from services.gateway.edge.anthropic import requests
from tests.unit.gateway.edge.talking import ALICE, BASE, END, Says, Talking

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
WEATHER: Any = {
    "name": "weather",
    "description": "Tells the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


@pytest.fixture
async def client(talks: Talking) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        base_url=f"{talks.url}/anthropic/api", api_key=ALICE, max_retries=0
    ) as made:
        yield made


def says(talks: Talking, text: str, stopped: bool = True) -> None:
    talks.sampler.script = lambda request: [Says(text, stopped)]


async def test_a_message_is_answered(talks: Talking, client: anthropic.AsyncAnthropic) -> None:
    says(talks, f"I am well.{END}")
    system: list[Any] = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    answer = await client.messages.create(model=BASE, system=system, messages=HELLO, max_tokens=7)
    assert talks.sampler.prompt() == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    (block,) = answer.content
    assert (block.type, block.text) == ("text", "I am well.")  # type: ignore[union-attr]
    assert (answer.stop_reason, answer.stop_sequence, answer.role) == ("end_turn", None, "assistant")
    assert answer.usage.output_tokens == talks.sampler.count(f"I am well.{END}")
    asked = talks.sampler.asked[0]
    assert answer.usage.cache_read_input_tokens == 2
    assert answer.usage.input_tokens == asked.prompt.shape[0] - 2
    assert (asked.params.max_tokens, asked.num_samples) == (7, 1)


async def test_why_a_message_ended_is_told(talks: Talking, client: anthropic.AsyncAnthropic) -> None:
    says(talks, "one\n\ntwo")
    answer = await client.messages.create(
        model=BASE, messages=HELLO, max_tokens=7, stop_sequences=["three", "\n\n"]
    )
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "\n\n")
    assert answer.content[0].text == "one"  # type: ignore[union-attr]
    says(talks, "one two", stopped=False)
    answer = await client.messages.create(model=BASE, messages=HELLO, max_tokens=7)
    assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_are_called_and_what_they_came_to_goes_back(
    talks: Talking, client: anthropic.AsyncAnthropic, stream: bool
) -> None:
    says(talks, f"I look.{CALL}\n{CALL}{END}")
    asked: dict[str, Any] = {"model": BASE, "messages": HELLO, "tools": [WEATHER], "max_tokens": 50}
    if stream:
        async with client.messages.stream(**asked) as events:
            answer = await events.get_final_message()
    else:
        answer = await client.messages.create(**asked)
    assert answer.stop_reason == "tool_use"
    said, *calls = answer.content
    assert said.text == "I look."  # type: ignore[union-attr]
    assert [(call.name, call.input) for call in calls] == [("weather", {"city": "Bonn"})] * 2  # type: ignore[union-attr]
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": "rain", "is_error": bool(place)}  # type: ignore[union-attr]
        for place, call in enumerate(calls)
    ]
    back: list[Any] = [
        *HELLO,
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]},
        {"role": "user", "content": [*results, {"type": "text", "text": "So?"}]},
    ]
    says(talks, f"Rain.{END}")
    await client.messages.create(model=BASE, messages=back, tools=[WEATHER], max_tokens=50)
    prompt = talks.sampler.prompt()
    assert f"<|im_start|>assistant\nI look.{CALL}{CALL}<|im_end|>" in prompt
    assert "<|im_start|>tool\nrain<|im_end|>\n<|im_start|>tool\nError: rain<|im_end|>" in prompt
    assert prompt.endswith("<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("choice", "kind"),
    [
        ({"type": "any"}, "tags_with_separator"),
        ({"type": "tool", "name": "weather", "disable_parallel_tool_use": True}, "tags_with_separator"),
        ({"type": "auto", "disable_parallel_tool_use": True}, "triggered_tags"),
    ],
)
async def test_a_choice_of_tools_constrains_what_is_generated(
    talks: Talking, client: anthropic.AsyncAnthropic, choice: Any, kind: str
) -> None:
    says(talks, f"{CALL}{END}")
    await client.messages.create(
        model=BASE, messages=HELLO, tools=[WEATHER], tool_choice=choice, max_tokens=50
    )
    form = json.loads(talks.sampler.asked[0].constraint.structural_tag)["format"]
    assert (form["type"], form["stop_after_first"]) == (kind, choice.get("disable_parallel_tool_use", False))


async def test_an_answer_is_constrained_by_its_schema(
    talks: Talking, client: anthropic.AsyncAnthropic
) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    await client.messages.create(
        model=BASE,
        messages=HELLO,
        max_tokens=50,
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    assert json.loads(talks.sampler.asked[0].constraint.json_schema) == schema


async def test_a_stream_tells_what_is_said_while_it_is_said(
    talks: Talking, client: anthropic.AsyncAnthropic
) -> None:
    says(talks, f"one two three four{END}")
    talks.sampler.half.clear()
    text = ""
    async with client.messages.stream(model=BASE, messages=HELLO, max_tokens=50) as events:
        async for more in events.text_stream:
            text += more
            talks.sampler.half.set()
        answer = await events.get_final_message()
    assert text == "one two three four"
    assert answer.stop_reason == "end_turn"
    assert answer.usage.output_tokens == talks.sampler.count(text + END)


async def test_tokens_are_counted_as_they_would_be_sampled(
    talks: Talking, client: anthropic.AsyncAnthropic
) -> None:
    counted = await client.messages.count_tokens(
        model=BASE, messages=HELLO, system="Be brief.", tools=[WEATHER]
    )
    await client.messages.create(
        model=BASE, messages=HELLO, system="Be brief.", tools=[WEATHER], max_tokens=5
    )
    assert counted.input_tokens == talks.sampler.asked[0].prompt.shape[0]


async def test_errors_come_in_anthropics_form_also_in_a_stream(
    talks: Talking, client: anthropic.AsyncAnthropic
) -> None:
    def script(request: object) -> list[Says]:
        raise InvalidRequest("the weights have diverged")

    talks.sampler.script = script
    with pytest.raises(anthropic.BadRequestError, match="diverged") as whole:
        await client.messages.create(model=BASE, messages=HELLO, max_tokens=5)
    assert whole.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    with pytest.raises(anthropic.APIStatusError, match="diverged"):
        async with client.messages.stream(model=BASE, messages=HELLO, max_tokens=5) as events:
            await events.get_final_message()
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.create(model="other", messages=HELLO, max_tokens=5)
    with pytest.raises(anthropic.AuthenticationError):
        await client.with_options(api_key="tml-none").messages.create(
            model=BASE, messages=HELLO, max_tokens=5
        )


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"container": "c"}, "container"),
        ({"speed": "fast"}, "speed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "I"}]}, "last message"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"output_config": {"effort": "high"}}, "reasoning_effort"),
        ({"extra_body": {"frequency": 1}}, "frequency"),
    ],
)
async def test_what_is_not_served_is_refused_with_its_name(
    client: anthropic.AsyncAnthropic, fields: dict, named: str
) -> None:
    with pytest.raises(anthropic.BadRequestError, match=named):
        await client.messages.create(**{"model": BASE, "messages": HELLO, "max_tokens": 5, **fields})


@pytest.mark.parametrize(
    ("theirs", "ours", "unserved"),
    [
        (
            message_create_params.MessageCreateParamsBase,
            requests.Message,
            requests.MESSAGE_UNSERVED,
        ),
        (message_count_tokens_params.MessageCountTokensParams, requests.Count, requests.COUNT_UNSERVED),
    ],
)
def test_every_field_that_the_anthropic_package_can_send_is_known(
    theirs: type, ours: type[msgspec.Struct], unserved: dict
) -> None:
    fields = {field.name: field.default for field in msgspec.structs.fields(ours)}
    assert set(theirs.__annotations__) <= fields.keys()
    assert all(fields[name] in accepted for name, (accepted, _) in unserved.items())
