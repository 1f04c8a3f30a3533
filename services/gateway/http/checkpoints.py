"""HTTP: what is known of training runs and their checkpoints."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from starlette.responses import Response

from services.common import ids
from services.common.errors import InvalidRequest
from services.gateway.http import messages
from services.gateway.http.routes import Call, reply
from services.gateway.stores import CheckpointRecord


async def weights_info(call: Call) -> Response:
    body = await call.json(messages.WeightsInfo)
    model_id, checkpoint_id = ids.parse_tinker_path(body.tinker_path)
    record = await call.app.models.checkpoint(call.owner, model_id, checkpoint_id)
    return reply(
        {
            "base_model": record.base_model,
            "optimizer_config": {"type": "adamw"},
            "is_lora": True,
            "lora_rank": record.lora_rank,
            "train_attn": record.train_attn,
            "train_mlp": record.train_mlp,
            "train_unembed": record.train_unembed,
        }
    )


async def training_run(call: Call) -> Response:
    # Nothing is shared between API keys, so what is accessible is what is owned.
    scope = call.request.query_params.get("access_scope", "owned")
    if scope not in ("owned", "accessible"):
        raise InvalidRequest(f"access_scope must be owned or accessible, not {scope[:50]!r}")
    model_id = call.request.path_params["training_run_id"]
    record = await call.app.models.get(call.owner, model_id)
    checkpoints = await call.app.models.checkpoints(call.owner, model_id)
    session = await call.app.sessions.last_seen(record.session_id)
    return reply(
        {
            "training_run_id": record.model_id,
            "base_model": record.base_model,
            "model_owner": record.owner,
            "is_lora": True,
            "lora_rank": record.lora_rank,
            "corrupted": record.status == "failed",
            "last_request_time": _time(max(record.created_at, session)),
            "last_checkpoint": _newest(checkpoints, "training"),
            "last_sampler_checkpoint": _newest(checkpoints, "sampler"),
            "user_metadata": record.user_metadata,
        }
    )


def _newest(checkpoints: list[CheckpointRecord], kind: str) -> dict[str, Any] | None:
    found = [record for record in checkpoints if record.kind == kind]
    return _checkpoint(max(found, key=lambda record: record.version)) if found else None


def _checkpoint(record: CheckpointRecord) -> dict[str, Any]:
    return {
        "checkpoint_id": record.checkpoint_id,
        "checkpoint_type": record.kind,
        "time": _time(record.created_at),
        "tinker_path": ids.tinker_path(record.model_id, record.checkpoint_id),
        "size_bytes": record.size_bytes,
        "public": False,
        "user_metadata": record.user_metadata or None,
        "expires_at": _time(record.expires_at) if record.expires_at else None,
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
