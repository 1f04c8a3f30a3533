"""HTTP: what the answers about runs, checkpoints and sessions share."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from services.common.contract import ids
from services.common.contract.errors import InvalidRequest
from services.gateway.edge.http.routes import Call
from services.gateway.records.checkpoint import CheckpointRecord


def number(call: Call, name: str, default: int) -> int:
    """A whole number of the query.

    Raises:
        InvalidRequest: it is none.
    """
    text = call.request.query_params.get(name)
    if text is None:
        return default
    if not (text.isdecimal() and text.isascii() and len(text) < 16):
        raise InvalidRequest(f"{name} must be a number, 0 or more, not {text[:50]!r}")
    return int(text)


def is_accessible(call: Call) -> bool:
    """Whether the query asks for what is accessible, and not only for what the caller owns.

    Raises:
        InvalidRequest: it asks for something else.
    """
    scope = call.request.query_params.get("access_scope", "owned")
    if scope not in ("owned", "accessible"):
        raise InvalidRequest(f"access_scope must be owned or accessible, not {scope[:50]!r}")
    return scope == "accessible"


def cursor(offset: int, limit: int, total: int) -> dict[str, int]:
    """What a page says about the whole list."""
    return {"offset": offset, "limit": limit, "total_count": total}


def checkpoint(record: CheckpointRecord | None) -> dict[str, Any] | None:
    """A checkpoint as the SDK reads it."""
    if record is None:
        return None
    return {
        "checkpoint_id": record.checkpoint_id,
        "checkpoint_type": record.kind,
        "time": time(record.created_at),
        "tinker_path": ids.tinker_path(record.model_id, record.checkpoint_id),
        "size_bytes": record.size_bytes,
        "public": record.public,
        "user_metadata": record.user_metadata or None,
        "expires_at": None if record.expires_at is None else time(record.expires_at),
    }


def time(seconds: float) -> str:
    """Unix time as ISO 8601 with its zone."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()
