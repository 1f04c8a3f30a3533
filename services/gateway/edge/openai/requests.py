"""Bodies of OpenAI's API, as strict structs.

Invariant: every field of the API is named here. Those that are not served are refused when they ask for
anything; labels that OpenAI keeps for the operator's own records change no answer there and none here.
"""

from __future__ import annotations

from typing import Any, Literal

from services.gateway.edge.http.codec.messages import Body, Int32
from services.gateway.edge.inference.unserved import Unserved

COMPLETION_UNSERVED: Unserved = {
    "best_of": ((None, 1), "ask for n and choose"),
    "suffix": ((None, ""), "the served models continue a prompt and fill nothing in"),
}
CHAT_UNSERVED: Unserved = {
    "audio": ((None,), "the served models speak text"),
    "function_call": ((None,), "use tool_choice"),
    "functions": ((None, []), "use tools"),
    "metadata": ((None, {}), "nothing is stored that it could be found by"),
    "modalities": ((None, ["text"]), "the served models speak text"),
    "moderation": ((None,), "nothing is moderated here"),
    "prediction": ((None,), "leave it out; the answer is the same"),
    "prompt_cache_options": ((None,), "prefixes stay while there is room"),
    "prompt_cache_retention": ((None, "in_memory", "in-memory"), "prefixes stay while there is room"),
    "service_tier": ((None, "auto", "default"), "there is one tier"),
    "store": ((None, False), "answers are not stored"),
    "verbosity": ((None,), "ask for it in the prompt"),
    "web_search_options": ((None,), "nothing is searched here"),
}


class StreamOptions(Body, kw_only=True):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class _Common(Body, kw_only=True):
    model: str
    n: Int32 | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None


class Completion(_Common, kw_only=True):
    """`prompt`: a text, tokens, or several of either."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: Int32 | None = None
    max_tokens: int | None = None
    best_of: Any = None
    suffix: Any = None


class TextPart(Body, tag_field="type", tag="text", kw_only=True):
    text: str


class RefusalPart(Body, tag_field="type", tag="refusal", kw_only=True):
    refusal: str


Text = str | list[TextPart]


class System(Body, tag_field="role", tag="system", kw_only=True):
    content: Text
    name: str | None = None


class Developer(Body, tag_field="role", tag="developer", kw_only=True):
    content: Text
    name: str | None = None


class User(Body, tag_field="role", tag="user", kw_only=True):
    content: Text
    name: str | None = None


class CalledFunction(Body, kw_only=True):
    name: str
    arguments: str


class ToolCall(Body, kw_only=True):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class Assistant(Body, tag_field="role", tag="assistant", kw_only=True):
    """Some fields are there because an answer is sent back as it came."""

    content: str | list[TextPart | RefusalPart] | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    name: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class Tool(Body, tag_field="role", tag="tool", kw_only=True):
    content: Text
    tool_call_id: str


Message = System | Developer | User | Assistant | Tool


class FunctionTool(Body, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSpec(Body, kw_only=True):
    function: FunctionTool
    type: Literal["function"]


class NamedFunction(Body, kw_only=True):
    name: str


class NamedChoice(Body, kw_only=True):
    function: NamedFunction
    type: Literal["function"]


class TextFormat(Body, tag_field="type", tag="text", kw_only=True):
    pass


class JsonObjectFormat(Body, tag_field="type", tag="json_object", kw_only=True):
    pass


class JsonSchema(Body, kw_only=True):
    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(Body, tag_field="type", tag="json_schema", kw_only=True):
    json_schema: JsonSchema


class Chat(_Common, kw_only=True):
    messages: list[Message]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Int32 | None = None
    tools: list[ToolSpec] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    metadata: Any = None
    modalities: Any = None
    moderation: Any = None
    prediction: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    service_tier: Any = None
    store: Any = None
    verbosity: Any = None
    web_search_options: Any = None
