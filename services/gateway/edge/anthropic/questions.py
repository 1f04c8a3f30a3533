"""Requests of Anthropic's API become questions and conversations: pure functions.

Invariant: what is returned asks for all that the body asks for, or there is an InvalidRequest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.common.contract.errors import InvalidRequest
from services.gateway.edge.anthropic import requests
from services.gateway.edge.inference.chat import Conversation
from services.gateway.inference.question import Constraint, Question
from services.gateway.text.tool_calls import Function


def question(body: requests.Message, prompt: Sequence[int], constraint: Constraint | None) -> Question:
    """The question of a message whose prompt is known."""
    if not 1 <= body.max_tokens < 2**31:
        raise InvalidRequest("max_tokens must be at least 1")
    if body.top_k is not None and not 1 <= body.top_k < 2**31:
        raise InvalidRequest("top_k must be at least 1")
    return Question(
        prompts=[prompt],
        max_tokens=body.max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=-1 if body.top_k is None else body.top_k,
        top_p=1.0 if body.top_p is None else body.top_p,
        stop=tuple(body.stop_sequences or ()),
        constraint=constraint,
        stream=body.stream,
    )


def conversation(body: requests.Count) -> Conversation:
    """What a message asks the model to go on with."""
    if not body.messages or isinstance(body.messages[-1], requests.Assistant):
        raise InvalidRequest(
            "the last message must be of the user; an answer that is begun is not gone on with"
        )
    messages = [made for message in body.messages for made in _messages(message)]
    if body.system:
        messages.insert(0, {"role": "system", "content": _text(body.system)})
    output = body.output_config or requests.OutputConfig()
    tools, functions = body.tools or [], _functions(body)
    required = isinstance(body.tool_choice, requests.AnyTool | requests.OneTool)
    return Conversation(
        messages=messages,
        tools=[_told(tool) for tool in tools] if functions else [],
        functions=functions,
        choice="required" if required else "auto",
        parallel=not getattr(body.tool_choice, "disable_parallel_tool_use", False),
        schema=None if output.format is None else output.format.schema,
        effort=output.effort,
        thinks=body.thinking is None,
    )


def _functions(body: requests.Count) -> list[Function]:
    functions = [Function(tool.name, tool.input_schema, tool.strict) for tool in body.tools or ()]
    match body.tool_choice:
        case requests.NoTool():
            return []
        case requests.OneTool(name=name):
            functions = [function for function in functions if function.name == name]
            if not functions:
                raise InvalidRequest(f"tool_choice names {name[:100]!r}, which is none of the tools")
        case requests.AnyTool() if not functions:
            raise InvalidRequest("tool_choice needs tools")
    return functions


def _told(tool: requests.Tool) -> dict[str, Any]:
    shown = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {
        "type": "function",
        "function": {name: value for name, value in shown.items() if value is not None},
    }


def _messages(message: requests.User | requests.Assistant) -> list[dict[str, Any]]:
    if isinstance(message.content, str):
        role = "user" if isinstance(message, requests.User) else "assistant"
        return [{"role": role, "content": message.content}]
    said = _text([block for block in message.content if isinstance(block, requests.Text)])
    if isinstance(message, requests.Assistant):
        calls = [_call(block) for block in message.content if isinstance(block, requests.ToolUse)]
        made: dict[str, Any] = {"role": "assistant", "content": said}
        return [{**made, "tool_calls": calls} if calls else made]
    results = [_result(block) for block in message.content if isinstance(block, requests.ToolResult)]
    return [*results, {"role": "user", "content": said}] if said or not results else results


def _call(block: requests.ToolUse) -> dict[str, Any]:
    return {
        "id": block.id,
        "type": "function",
        "function": {"name": block.name, "arguments": block.input},
    }


def _result(block: requests.ToolResult) -> dict[str, Any]:
    text = _text(block.content)
    # No template has a place for it but the text.
    content = f"Error: {text}" if block.is_error else text
    return {"role": "tool", "content": content, "tool_call_id": block.tool_use_id}


def _text(content: str | Sequence[requests.Text]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)
