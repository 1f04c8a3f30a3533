"""Chat templates are rendered as the transformers library renders them."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from services.common.contract.errors import InvalidRequest
from services.gateway.text.chat_template import ChatTemplate
from services.launcher.tiny_model import CHATML_TEMPLATE

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Bé <brief> & kind."},
    {"role": "user", "content": "hi"},
    {
        "role": "assistant",
        "content": "one",
        "tool_calls": [{"function": {"name": "f", "arguments": {"a": "ü<"}}}],
    },
]
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "z": 1, "a": [1, 2]}}}
]
LOOPS = (
    "{{ bos_token }}{% for m in messages %}\n"
    "    {% if m.role == 'system' %}{% continue %}{% endif %}\n"
    "    {% generation %}{{ m.content | trim }}{% endgeneration %}\n"
    "    {%- if loop.index == 2 %}{% break %}{% endif %}\n"
    "{% endfor %}{{ tools | tojson(indent=2) }}{{ strftime_now('%Y') | length }}"
    "{% set ns = namespace(n=0) %}{% set ns.n = 3 %}{{ ns.n }}{{ enable_thinking is defined }}"
)


@pytest.mark.parametrize("source", [CHATML_TEMPLATE, LOOPS])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_prompt_is_what_transformers_makes_of_the_template(
    source: str, tools: list[dict[str, Any]] | None
) -> None:
    ours = ChatTemplate(source, SPECIAL).render(MESSAGES, tools, {"enable_thinking": False})
    theirs = render_jinja_template(
        [MESSAGES], tools, None, source, add_generation_prompt=True, enable_thinking=False, **SPECIAL
    )
    assert [ours] == theirs[0]


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 3 }}",
        "{{ messages[17].content.nothing }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    ],
)
def test_what_a_template_cannot_render_is_the_requests_fault(source: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template"):
        ChatTemplate(source, SPECIAL).render(MESSAGES, None, {})


def test_a_template_that_is_none_is_said_to_be() -> None:
    with pytest.raises(InvalidRequest, match="chat template"):
        ChatTemplate("{% for %}", SPECIAL)


def test_the_variables_that_a_template_reads_are_known() -> None:
    template = ChatTemplate(LOOPS, SPECIAL)
    assert template.reads("enable_thinking")
    assert not template.reads("reasoning_effort")
