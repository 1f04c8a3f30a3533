"""Calls of tools in generated text: what they look like, what constrains them, and reading them.

Invariant: what is given out as text is no part of a call, and every call that is given out was whole. What
looks like a call and is none stays text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

Choice = Literal["auto", "required"]

_BEGIN, _END = "<tool_call>", "</tool_call>"
"""How a model writes a call: name and arguments as JSON between these tags, as Hermes and Qwen do."""


@dataclass(frozen=True)
class Function:
    """A tool that may be called.

    Attributes:
        parameters: JSON Schema of its arguments.
        strict: calls must match the schema also where the model is free to call or not.
    """

    name: str
    parameters: dict[str, Any]
    strict: bool = False


@dataclass(frozen=True)
class Call:
    """A call. `arguments` is JSON."""

    name: str
    arguments: str


def structural_tag(functions: Sequence[Function], choice: Choice, *, parallel: bool) -> str | None:
    """The structural tag that makes calls what they must be, as JSON; None = the model is free.

    Args:
        choice: "auto" = it may call; "required" = it must call a function, and say nothing else.
        parallel: it may make several calls at once.
    """
    if choice == "auto" and parallel and not any(function.strict for function in functions):
        return None
    tags = [
        {
            "type": "tag",
            "begin": f'{_BEGIN}\n{{"name": {json.dumps(function.name)}, "arguments": ',
            "content": {"type": "json_schema", "json_schema": function.parameters},
            "end": f"}}\n{_END}",
        }
        for function in functions
    ]
    form: dict[str, Any] = {"tags": tags, "stop_after_first": not parallel}
    if choice == "auto":
        form |= {"type": "triggered_tags", "triggers": [_BEGIN], "at_least_one": False}
    else:
        form |= {"type": "tags_with_separator", "separator": "\n", "at_least_one": True}
    return json.dumps({"type": "structural_tag", "format": form})


def teaches_calls(chat_template: str) -> bool:
    """Whether a chat template teaches its model to call as it is read here."""
    known = _BEGIN in chat_template and _END in chat_template and "arguments" in chat_template
    return known and "<function=" not in chat_template


class CallReader:
    """Finds the calls in a text that comes in pieces."""

    def __init__(self) -> None:
        self._held = ""
        self._called = False

    def push(self, text: str) -> Iterator[str | Call]:
        """Text and calls, in order, as far as they are known."""
        self._held += text
        while self._held:
            before, begin, rest = self._held.partition(_BEGIN)
            if not begin:
                sure = len(self._held) - _overlap(self._held, _BEGIN)
                yield from self._say(self._held[:sure])
                self._held = self._held[sure:]
                return
            inside, end, after = rest.partition(_END)
            if not end:
                yield from self._say(before)
                self._held = self._held[len(before) :]
                return
            call = _parsed(inside)
            yield from self._say(before if call else before + begin + inside + end)
            if call is not None:
                self._called = True
                yield call
            self._held = after

    def finish(self) -> Iterator[str | Call]:
        """What was held and did not become a call."""
        held, self._held = self._held, ""
        yield from self._say(held)

    def _say(self, text: str) -> Iterator[str]:
        # Between and after calls there are line breaks that say nothing.
        if text and not (self._called and not text.strip()):
            yield text


def _overlap(text: str, tag: str) -> int:
    """Characters at the end of a text that the tag begins with."""
    most = min(len(text), len(tag) - 1)
    return next((size for size in range(most, 0, -1) if tag.startswith(text[-size:])), 0)


def _parsed(inside: str) -> Call | None:
    try:
        found = msgspec.json.decode(inside)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return Call(found["name"], json.dumps(arguments, ensure_ascii=False))
