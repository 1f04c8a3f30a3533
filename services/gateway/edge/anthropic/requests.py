"""Bodies of Anthropic's API, as strict structs.

Invariant: every field of the API is named here. Those that are not served are refused when they ask for
anything; labels and hints for caches change no answer there and none here.
"""

from __future__ import annotations

from typing import Any, Literal

from services.gateway.edge.http.codec.messages import Body
from services.gateway.edge.inference.unserved import Unserved

_BOTH: Unserved = {
    "speed": ((None, "standard"), "there is one speed"),
    "user_profile_id": ((None,), "API keys tell who calls"),
    "workspace_id": ((None,), "API keys tell who calls"),
}
COUNT_UNSERVED: Unserved = _BOTH
MESSAGE_UNSERVED: Unserved = {
    **_BOTH,
    "container": ((None,), "no code is run here"),
    "diagnostics": ((None,), "leave it out"),
    "inference_geo": ((None,), "there is one place"),
    "service_tier": ((None, "auto", "standard_only"), "there is one tier"),
}


class CacheControl(Body, kw_only=True):
    """A hint: prefixes are cached in any case, as long as there is room."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Text(Body, tag_field="type", tag="text", kw_only=True):
    """`citations` is there because an answer is sent back as it came."""

    text: str
    cache_control: CacheControl | None = None
    citations: None = None


class ToolUse(Body, tag_field="type", tag="tool_use", kw_only=True):
    """`caller` and `toolset_name` are there because an answer is sent back as it came."""

    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: None = None
    toolset_name: None = None


class ToolResult(Body, tag_field="type", tag="tool_result", kw_only=True):
    tool_use_id: str
    content: str | list[Text] = ""
    is_error: bool = False
    cache_control: CacheControl | None = None


class User(Body, tag_field="role", tag="user", kw_only=True):
    content: str | list[Text | ToolResult]


class Assistant(Body, tag_field="role", tag="assistant", kw_only=True):
    content: str | list[Text | ToolUse]


class Tool(Body, kw_only=True):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool = False
    type: Literal["custom"] | None = None
    cache_control: CacheControl | None = None


class Auto(Body, tag_field="type", tag="auto", kw_only=True):
    disable_parallel_tool_use: bool = False


class AnyTool(Body, tag_field="type", tag="any", kw_only=True):
    disable_parallel_tool_use: bool = False


class OneTool(Body, tag_field="type", tag="tool", kw_only=True):
    name: str
    disable_parallel_tool_use: bool = False


class NoTool(Body, tag_field="type", tag="none", kw_only=True):
    pass


class JsonFormat(Body, kw_only=True):
    schema: dict[str, Any]
    type: Literal["json_schema"]


class OutputConfig(Body, kw_only=True):
    effort: str | None = None
    format: JsonFormat | None = None


class NoThinking(Body, kw_only=True):
    type: Literal["disabled"]


class Metadata(Body, kw_only=True):
    user_id: str | None = None


class Count(Body, kw_only=True):
    """What is counted: all that becomes the prompt."""

    model: str
    messages: list[User | Assistant]
    system: str | list[Text] | None = None
    tools: list[Tool] | None = None
    tool_choice: Auto | AnyTool | OneTool | NoTool | None = None
    thinking: NoThinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    speed: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None


class Message(Count, kw_only=True):
    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    metadata: Metadata | None = None
    container: Any = None
    diagnostics: Any = None
    inference_geo: Any = None
    service_tier: Any = None
