"""Answers in the form of Anthropic's API: pure functions.

Invariant: the `anthropic` package reads every one of them without a field missing or of another type.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from services.common.contract.errors import TinsmithError
from services.gateway.edge.inference.chat import Reply, Said
from services.gateway.edge.inference.endpoint import event
from services.gateway.inference.question import Done
from services.gateway.text.tool_calls import Call

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}
_NO_MODEL = frozenset({"unknown_base_model", "not_sampleable", "base_model_retired"})


def error(given: TinsmithError) -> tuple[int, dict[str, Any]]:
    """HTTP status and body of an error."""
    status = 404 if given.code in _NO_MODEL else given.http_status
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return status, {"type": "error", "error": {"type": kind, "message": given.message}}


def message(
    model: str, content: list[dict[str, Any]], usage: dict[str, Any], reason: str | None, stop: str | None
) -> dict[str, Any]:
    """A message. `reason` None: it has just begun."""
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": stop,
        "usage": usage,
    }


def usage(done: Done, output: int) -> dict[str, Any]:
    """Tokens of one message. Those of the prompt that came from the cache are told apart."""
    return {
        "input_tokens": done.prompt_tokens - done.cached_tokens,
        "cache_read_input_tokens": done.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": output,
    }


def stop_reason(reply: Reply, stopped: bool) -> str:
    if not stopped:
        return "max_tokens"
    if reply.stop is not None:
        return "stop_sequence"
    return "tool_use" if reply.calls else "end_turn"


def blocks(parts: Iterable[Said | Call]) -> list[dict[str, Any]]:
    """The content of a whole message."""
    found: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, Call):
            found.append({**_tool_use(part), "input": json.loads(part.arguments)})
        elif found and found[-1]["type"] == "text":
            found[-1]["text"] += part.text
        elif part.text:
            found.append({"type": "text", "text": part.text})
    return found


def _tool_use(call: Call) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex}", "name": call.name, "input": {}}


class Blocks:
    """The events of a message's content, whose blocks follow one another."""

    def __init__(self) -> None:
        self._index = -1
        self._text = False

    def events(self, parts: Iterable[Said | Call]) -> Iterator[bytes]:
        for part in parts:
            if isinstance(part, Call):
                yield from self.close()
                yield self._start(_tool_use(part))
                yield self._delta({"type": "input_json_delta", "partial_json": part.arguments})
                yield self._stop()
            elif part.text:
                if not self._text:
                    self._text = True
                    yield self._start({"type": "text", "text": ""})
                yield self._delta({"type": "text_delta", "text": part.text})

    def close(self) -> Iterator[bytes]:
        """Ends the block that is open."""
        if self._text:
            self._text = False
            yield self._stop()

    def _start(self, block: dict[str, Any]) -> bytes:
        self._index += 1
        return named({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return named({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _stop(self) -> bytes:
        return named({"type": "content_block_stop", "index": self._index})


def named(data: dict[str, Any]) -> bytes:
    """An event, whose name is its type."""
    return event(data, data["type"])
