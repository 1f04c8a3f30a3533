"""Chats: a conversation as a prompt, and a generated sequence as what the assistant says and calls.

Invariant: what a conversation asks for that the model's template does not read is refused, never left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from services.common.contract.errors import InvalidRequest
from services.gateway.inference.question import Constraint
from services.gateway.text.chat_template import ChatTemplate
from services.gateway.text.generated import Generated, Token
from services.gateway.text.tokenizer import Tokenizer
from services.gateway.text.tool_calls import Call, CallReader, Function, structural_tag

MAX_SCHEMA_BYTES = 64 * 1024
_AT_ONCE = 256
"""Tokens of which objects are made at once."""
_OURS = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


@dataclass(frozen=True)
class Conversation:
    """What a model is to go on with.

    Attributes:
        messages: as chat templates take them: role, content and, where there are any, tool_calls.
        tools: of the functions that may be called, as chat templates take them.
        functions: the same, as they are constrained.
        choice: "auto" = it may call one; "required" = it must, and `functions` has those to choose from.
        parallel: it may make several calls at once.
        schema: JSON Schema of the whole answer; None = any text.
        effort: how long it is to think; None = as the template has it.
        thinks: False = it is not to think, where the template can tell it so.
        variables: more for the template.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]
    functions: Sequence[Function]
    choice: Literal["auto", "required"]
    parallel: bool
    schema: Mapping[str, Any] | None
    effort: str | None
    thinks: bool = True
    variables: Mapping[str, Any] = field(default_factory=dict)


def prompt_of(tokenizer: Tokenizer, conversation: Conversation) -> list[int]:
    """The tokens of a conversation. Takes time in proportion to it.

    Raises:
        InvalidRequest: the model has no template, or its template does not read what is given.
    """
    template = tokenizer.chat_template
    if template is None:
        raise InvalidRequest("this model has no chat template; send it a completion", "no_chat_template")
    variables = _variables(template, conversation)
    tools = conversation.tools or None
    if tools:
        _check_calls(tokenizer)
    return tokenizer.tokens(template.render(conversation.messages, tools, variables), special=False)


def prompted(tokenizer: Tokenizer, conversation: Conversation) -> tuple[list[int], Constraint | None]:
    """A conversation's tokens, and what its answer must match. Raises as `prompt_of` and `constraint_of`."""
    return prompt_of(tokenizer, conversation), constraint_of(tokenizer, conversation)


def constraint_of(tokenizer: Tokenizer, conversation: Conversation) -> Constraint | None:
    """What the answer must match.

    Raises:
        InvalidRequest: that cannot be said.
    """
    if conversation.functions:
        if conversation.schema is not None:
            raise InvalidRequest("an answer is constrained by tools or by a JSON schema, not by both")
        _check_calls(tokenizer)
        try:
            tag = structural_tag(conversation.functions, conversation.choice, parallel=conversation.parallel)
        except RecursionError as error:
            raise InvalidRequest("the parameters of a tool are nested too deeply") from error
        return None if tag is None else _bounded(Constraint("structural_tag", tag))
    if conversation.schema is not None:
        return _bounded(Constraint("json_schema", _json(conversation.schema)))
    return None


def _json(schema: Mapping[str, Any]) -> str:
    try:
        return json.dumps(schema)
    except RecursionError as error:
        raise InvalidRequest("the JSON schema is nested too deeply") from error


def _bounded(constraint: Constraint) -> Constraint:
    size = len(constraint.source.encode())
    if size > MAX_SCHEMA_BYTES:
        raise InvalidRequest(f"the JSON schemas have {size} bytes; send at most {MAX_SCHEMA_BYTES}")
    return constraint


def _check_calls(tokenizer: Tokenizer) -> None:
    if not tokenizer.calls_tools:
        raise InvalidRequest(
            "tools are not served for this model: its chat template has none, or a form of calls that is not "
            "read here",
            "tools_not_served",
        )


def _variables(template: ChatTemplate, conversation: Conversation) -> dict[str, Any]:
    variables = dict(conversation.variables)
    for name in variables:
        if name in _OURS or not template.reads(name):
            raise InvalidRequest(f"chat_template_kwargs has {name[:100]!r}, which the template does not read")
    if not conversation.thinks and template.reads("enable_thinking"):
        variables["enable_thinking"] = False
    if conversation.effort is None:
        return variables
    if template.reads("reasoning_effort"):
        variables["reasoning_effort"] = conversation.effort
    elif conversation.effort == "none" and template.reads("enable_thinking"):
        variables["enable_thinking"] = False
    else:
        raise InvalidRequest(f"this model's chat template has no reasoning_effort {conversation.effort!r}")
    return variables


@dataclass(frozen=True)
class Said:
    """Text, and the tokens that it came with."""

    text: str
    tokens: tuple[Token, ...] = ()


class Reply:
    """One generated sequence as a reply.

    Args:
        stops: stop strings.
        calls: it may have calls; otherwise what looks like one is text.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], calls: bool = False) -> None:
        self._generated = Generated(tokenizer, stops)
        self._reader = CallReader() if calls else None
        self._taken = 0
        self.calls = 0
        """Calls so far."""

    @property
    def count(self) -> int:
        """Tokens so far, those of the end included."""
        return self._generated.count

    @property
    def stop(self) -> str | None:
        """The stop string that the text ended at."""
        return self._generated.stop

    def push(self, tokens: Sequence[Token]) -> Iterator[Said | Call]:
        """What is known of it after more tokens."""
        self._taken += len(tokens)
        piece = self._generated.push(tokens)
        yield from self._read(piece.text, piece.tokens)

    def finish(self, tokens: Sequence[Token], stopped: bool) -> Iterator[Said | Call]:
        """The rest of it.

        Args:
            tokens: all of the sequence.
            stopped: it ended at a stop string or token.
        """
        rest = tokens[self._taken :]
        for start in range(0, len(rest), _AT_ONCE):
            yield from self.push(rest[start : start + _AT_ONCE])
        piece = self._generated.finish(stopped)
        yield from self._read(piece.text, piece.tokens)
        if self._reader is not None:
            yield from self._told(self._reader.finish(), ())

    def _read(self, text: str, tokens: tuple[Token, ...]) -> Iterator[Said | Call]:
        if self._reader is None:
            if text or tokens:
                yield Said(text, tokens)
        else:
            yield from self._told(self._reader.push(text), tokens)

    def _told(self, parts: Iterator[str | Call], tokens: tuple[Token, ...]) -> Iterator[Said | Call]:
        if tokens:
            yield Said("", tokens)
        for part in parts:
            if isinstance(part, Call):
                self.calls += 1
                yield part
            else:
                yield Said(part)
