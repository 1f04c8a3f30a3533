"""Calls of tools in generated text."""

from __future__ import annotations

import json

import pytest

from services.gateway.text.tool_calls import Call, CallReader, Function, structural_tag, teaches_calls

WEATHER = Function("weather", {"type": "object", "properties": {"city": {"type": "string"}}})
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


def read(text: str, size: int) -> list[str | Call]:
    reader = CallReader()
    found: list[str | Call] = []
    for at in range(0, len(text), size):
        found += reader.push(text[at : at + size])
    found += reader.finish()
    joined: list[str | Call] = []
    for part in found:
        if joined and isinstance(part, str) and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    return joined


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_calls_are_taken_out_of_the_text_however_it_is_cut(size: int) -> None:
    call = Call("weather", '{"city": "Köln"}')
    assert read(f"I look.\n{CALL}\n{CALL}\n", size) == ["I look.\n", call, call]
    assert read("a < b and <tool is no call", size) == ["a < b and <tool is no call"]


@pytest.mark.parametrize(
    "inside", ["{", '{"arguments": {}}', '["weather"]', '{"name": "f", "arguments": "x"}', '{"name": 3}']
)
def test_what_is_no_call_stays_text(inside: str) -> None:
    text = f"<tool_call>{inside}</tool_call> indeed"
    assert read(text, 5) == [text]


def test_a_call_that_was_cut_off_is_text() -> None:
    assert read(CALL[:-4], 6) == [CALL[:-4]]


def test_a_free_model_is_constrained_only_by_strict_functions_or_a_single_call() -> None:
    strict = Function("weather", WEATHER.parameters, strict=True)
    assert structural_tag([WEATHER], "auto", parallel=True) is None
    for functions, parallel in (([strict], True), ([WEATHER], False)):
        tag = json.loads(structural_tag(functions, "auto", parallel=parallel) or "")["format"]
        assert (tag["type"], tag["at_least_one"], tag["stop_after_first"]) == (
            "triggered_tags",
            False,
            not parallel,
        )


def test_a_required_call_is_all_that_may_be_said_and_is_read_back() -> None:
    tag = json.loads(structural_tag([WEATHER], "required", parallel=False) or "")["format"]
    assert (tag["type"], tag["at_least_one"], tag["stop_after_first"]) == ("tags_with_separator", True, True)
    (only,) = tag["tags"]
    assert only["content"]["json_schema"] == WEATHER.parameters
    assert read(only["begin"] + '{"city": "Bonn"}' + only["end"], 3) == [Call("weather", '{"city": "Bonn"}')]


def test_a_format_that_is_not_read_is_told_from_the_one_that_is() -> None:
    assert not teaches_calls("{{ messages }}")
    assert not teaches_calls("<tool_call>\n<function=f> arguments </tool_call>")
    assert teaches_calls('<tool_call>\n{"name": n, "arguments": a}\n</tool_call>')
