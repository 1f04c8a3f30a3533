"""Chat templates, rendered as the transformers library renders them.

Invariant: a template runs in Jinja's immutable sandbox, and what it cannot render is the request's fault.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.common.contract.errors import InvalidRequest


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what training computes its loss on; a prompt has just what is in it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One chat template.

    Args:
        special_tokens: names that it may use.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        self._special = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
            self._names = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise InvalidRequest(
                f"the chat template of this model is none: {error}", "no_chat_template"
            ) from error

    def reads(self, name: str) -> bool:
        """Whether the template does something with a variable."""
        return name in self._names

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt of a conversation, up to where the assistant goes on.

        Args:
            tools: function tools in OpenAI's form; None = there are none.
            variables: more that the template reads.

        Raises:
            InvalidRequest: the template refuses the messages.
        """
        given = {**self._special, **variables, "messages": messages, "tools": tools, "documents": None}
        try:
            return self._template.render({**given, "add_generation_prompt": True})
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            RecursionError,
        ) as error:
            raise InvalidRequest(f"the chat template does not take these messages: {error}") from error


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
