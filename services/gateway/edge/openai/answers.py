"""Answers in the form of OpenAI's API: pure functions.

Invariant: the `openai` package reads every one of them without a field missing or of another type.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from services.common.contract.errors import TinsmithError
from services.gateway.cluster.base_models import BaseModel
from services.gateway.inference.question import Done
from services.gateway.sampling.accept import Weights
from services.gateway.text.generated import Token
from services.gateway.text.tokenizer import Tokenizer
from services.gateway.text.tool_calls import Call

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_NO_MODEL = frozenset({"unknown_base_model", "not_sampleable", "base_model_retired"})


def error(given: TinsmithError) -> tuple[int, dict[str, Any]]:
    """HTTP status and body of an error."""
    status, code = given.http_status, given.code
    if code in _NO_MODEL:
        status, code = 404, "model_not_found"
    elif status == 401:
        code = "invalid_api_key"
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return status, {"error": {"message": given.message, "type": kind, "param": None, "code": code}}


def model(base: BaseModel) -> dict[str, Any]:
    """A base model of the list. `created` is not known."""
    return {"id": base.name, "object": "model", "created": 0, "owned_by": "tinsmith"}


@dataclass(frozen=True)
class Head:
    """What all parts of one answer have in common."""

    kind: str
    model: str
    fingerprint: str
    id: str
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def new(cls, prefix: str, kind: str, model: str, weights: Weights) -> Head:
        """
        Args:
            weights: what answers; the fingerprint tells one snapshot from another.
        """
        snapshot = f"{weights.model_id}@{weights.version}" if weights.model_id else weights.base_model
        return cls(kind, model, snapshot, f"{prefix}-{uuid.uuid4().hex}")

    def of(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self.kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
            "usage": usage,
        }


def usage(done: Iterable[Done]) -> dict[str, Any]:
    """The tokens of one request."""
    parts = list(done)
    prompt = sum(part.prompt_tokens for part in parts)
    completion = sum(len(sequence.tokens) for part in parts for sequence in part.sequences)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(part.cached_tokens for part in parts)},
    }


def finish_reason(stopped: bool, calls: int = 0) -> str:
    if not stopped:
        return "length"
    return "tool_calls" if calls else "stop"


def completion_logprobs(
    tokenizer: Tokenizer, tokens: Iterable[Token], start: int, likely: int
) -> dict[str, Any]:
    """The tokens of a completion's text, the first of which begins at character `start`. Goes over them once,
    and keeps none."""
    texts: list[str] = []
    logprobs: list[float | None] = []
    tops: list[msgspec.Raw] = []
    offsets: list[int] = []
    for token in tokens:
        texts.append(tokenizer.piece(token.id))
        logprobs.append(_number(token.logprob))
        offsets.append(start)
        start += len(texts[-1])
        if likely:
            top = {tokenizer.piece(one.id): one.logprob for one in token.likely}
            tops.append(_written(None if math.isnan(token.logprob) else top))
    return {
        "tokens": texts,
        "token_logprobs": logprobs,
        "top_logprobs": tops if likely else None,
        "text_offset": offsets,
    }


def _written(value: Any) -> msgspec.Raw:
    """The JSON of a value, which takes a tenth of its memory."""
    return msgspec.Raw(msgspec.json.encode(value))


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def chat_logprobs(tokenizer: Tokenizer, tokens: Iterable[Token]) -> dict[str, Any]:
    """The tokens of a message's content. Goes over them once, and keeps none."""
    return {
        "content": [
            _written(
                {
                    **_named(tokenizer, token.id, token.logprob),
                    "top_logprobs": [_named(tokenizer, one.id, one.logprob) for one in token.likely],
                }
            )
            for token in tokens
        ],
        "refusal": None,
    }


def _named(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    text = tokenizer.piece(token)
    # Of a part of a character the bytes are not known.
    return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}


def tool_call(call: Call) -> dict[str, Any]:
    """A call with an id of its own."""
    return {
        "id": f"call_{uuid.uuid4().hex}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
