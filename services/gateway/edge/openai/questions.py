"""Requests of OpenAI's API become questions and conversations: pure functions.

Invariant: what is returned asks for all that the body asks for, or there is an InvalidRequest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from services.common.contract.errors import InvalidRequest
from services.common.contract.steering import Steering
from services.gateway.edge.inference.chat import Conversation
from services.gateway.edge.inference.unserved import refuse_unserved
from services.gateway.edge.openai import requests
from services.gateway.inference.question import Question
from services.gateway.text.tokenizer import Tokenizer
from services.gateway.text.tool_calls import Function

MOST_PROMPTS = 256
_COMPLETION_TOKENS = 16
"""What OpenAI generates of a completion when max_tokens is left out."""
_ANY_OBJECT = {"type": "object"}


def completion(body: requests.Completion, tokenizer: Tokenizer) -> Question:
    """The question of a completion. Takes time in proportion to its prompts."""
    refuse_unserved(body, requests.COMPLETION_UNSERVED)
    logprobs, echo = body.logprobs, bool(body.echo)
    if logprobs is not None and logprobs < 0:
        raise InvalidRequest("logprobs must be 0 or more")
    if echo and body.stream:
        raise InvalidRequest("echo is not served in a stream; the client has the prompt")
    prompts = [
        tokenizer.tokens(prompt, special=True) if isinstance(prompt, str) else prompt
        for prompt in prompts_of(body)
    ]
    return _question(
        body,
        prompts,
        _COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs,
        prompt_likely=logprobs if echo else None,
        echo=echo,
    )


def prompts_of(body: requests.Completion) -> Sequence[str | list[int]]:
    """The prompts of a completion, as they were sent: texts or tokens."""
    given = body.prompt
    if isinstance(given, str):
        return [given]
    prompts: list[str | list[int]] = [item for item in given if not isinstance(item, int)]
    if given and not prompts:
        prompts = [[item for item in given if isinstance(item, int)]]
    elif len(prompts) != len(given) or len({type(item) for item in prompts}) != 1:
        raise InvalidRequest("prompt must be a text, tokens, a list of texts or a list of lists of tokens")
    if len(prompts) > MOST_PROMPTS:
        raise InvalidRequest(f"prompt has {len(prompts)} prompts; send at most {MOST_PROMPTS} at once")
    for prompt in prompts:
        if isinstance(prompt, list) and not all(0 <= token < 2**31 for token in prompt):
            raise InvalidRequest("a prompt token is outside of any vocabulary", "token_out_of_range")
    return prompts


def chat(body: requests.Chat, prompt: Sequence[int]) -> Question:
    """The question of a chat whose prompt is known, but for its constraint."""
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs=true")
    if body.top_logprobs is not None and body.top_logprobs < 0:
        raise InvalidRequest("top_logprobs must be 0 or more")
    limits = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise InvalidRequest("max_tokens and max_completion_tokens differ; send one of them")
    likely = body.top_logprobs or 0 if body.logprobs else None
    return _question(body, [prompt], limits.pop() if limits else None, likely)


def _steering(body: requests.Chat | requests.Completion) -> Steering:
    bias = body.logit_bias or {}
    if not all(token.isascii() and token.isdecimal() and len(token) < 10 for token in bias):
        raise InvalidRequest("the names in logit_bias must be token ids", field="logit_bias")
    biases = {int(token): more for token, more in bias.items()}
    if len(biases) != len(bias):
        raise InvalidRequest("logit_bias names a token twice; add the two up", field="logit_bias")
    return Steering(
        min_p=body.min_p or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=biases,
    )


def _question(
    body: requests.Chat | requests.Completion,
    prompts: Sequence[Sequence[int]],
    max_tokens: int | None,
    likely: int | None,
    prompt_likely: int | None = None,
    echo: bool = False,
) -> Question:
    """`likely`: None = no log-probabilities are asked for."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream=true")
    if body.seed is not None and not 0 <= body.seed < 2**64:
        raise InvalidRequest(f"seed must be 0 to {2**64 - 1}")
    if max_tokens is not None and not 1 <= max_tokens < 2**31:
        raise InvalidRequest("max_tokens must be at least 1, or left out")
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return Question(
        prompts=prompts,
        num_samples=1 if body.n is None else body.n,
        max_tokens=max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=_top_k(body.top_k),
        top_p=1.0 if body.top_p is None else body.top_p,
        seed=body.seed,
        stop=tuple(stop),
        steering=_steering(body),
        scored=likely is not None,
        likely=likely or 0,
        prompt_likely=prompt_likely,
        echo=echo,
        stream=bool(body.stream),
    )


def _top_k(given: int | None) -> int:
    if given is not None and not -1 <= given < 2**31:
        raise InvalidRequest("top_k must be at least 1, or -1 for all tokens")
    return given or -1


def conversation(body: requests.Chat) -> Conversation:
    """What a chat asks the model to go on with."""
    refuse_unserved(body, requests.CHAT_UNSERVED)
    if not body.messages:
        raise InvalidRequest("messages is empty")
    tools, functions, choice = _tools(body)
    return Conversation(
        messages=[_message(message) for message in body.messages],
        tools=tools,
        functions=functions,
        choice=choice,
        parallel=body.parallel_tool_calls is not False,
        schema=_schema(body),
        effort=body.reasoning_effort,
        variables=body.chat_template_kwargs or {},
    )


def _tools(
    body: requests.Chat,
) -> tuple[list[dict[str, Any]], list[Function], Literal["auto", "required"]]:
    specs, choice = body.tools or [], body.tool_choice
    if not specs and choice not in (None, "none", "auto"):
        raise InvalidRequest("tool_choice needs tools")
    if choice == "none" or not specs:
        return [], [], "auto"
    functions = [
        Function(spec.function.name, spec.function.parameters or _ANY_OBJECT, bool(spec.function.strict))
        for spec in specs
    ]
    if isinstance(choice, requests.NamedChoice):
        named = choice.function.name
        functions = [function for function in functions if function.name == named]
        if not functions:
            raise InvalidRequest(f"tool_choice names {named[:100]!r}, which is none of the tools")
    told = [{"type": "function", "function": _told(spec.function)} for spec in specs]
    return told, functions, "auto" if choice in (None, "auto") else "required"


def _told(function: requests.FunctionTool) -> dict[str, Any]:
    """A function as templates show it to the model, without what only constrains it."""
    shown = {"name": function.name, "description": function.description, "parameters": function.parameters}
    return {name: value for name, value in shown.items() if value is not None}


def _schema(body: requests.Chat) -> dict[str, Any] | None:
    match body.response_format:
        case requests.JsonObjectFormat():
            return _ANY_OBJECT
        case requests.JsonSchemaFormat(json_schema=given):
            if given.schema is None:
                raise InvalidRequest("response_format.json_schema has no schema")
            return given.schema
    return None


def _message(message: requests.Message) -> dict[str, Any]:
    match message:
        case requests.System() | requests.Developer():
            made = {"role": "system", "content": _text(message.content)}
        case requests.User():
            made = {"role": "user", "content": _text(message.content)}
        case requests.Tool():
            made = {"role": "tool", "content": _text(message.content), "tool_call_id": message.tool_call_id}
        case requests.Assistant():
            made = _assistant(message)
    name = getattr(message, "name", None)
    return made if name is None else {**made, "name": name}


def _assistant(message: requests.Assistant) -> dict[str, Any]:
    content = _text(message.content or "") or (message.refusal or "")
    made: dict[str, Any] = {"role": "assistant", "content": content}
    if message.tool_calls:
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.reasoning_content is not None:
        made["reasoning_content"] = message.reasoning_content
    return made


def _arguments(source: str) -> Any:
    """Arguments as templates take them: the object, not its text."""
    try:
        return msgspec.json.decode(source) if source else {}
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"the arguments of a tool call are no JSON: {error}") from error


def _text(content: str | Sequence[requests.TextPart | requests.RefusalPart]) -> str:
    if isinstance(content, str):
        return content
    parts = [part.text if isinstance(part, requests.TextPart) else part.refusal for part in content]
    return "\n".join(parts)
