"""HTTP: training runs, and models as such."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from services.gateway.edge.http.codec import messages, paging
from services.gateway.edge.http.routes import Call, promise, reply
from services.gateway.edge.http.training import lora_fields
from services.gateway.training.runs import Run


async def list_runs(call: Call) -> Response:
    call.check_query("limit", "offset", "access_scope", "project_id")
    # Runs as such are not shared between API keys, so the accessible ones are those that are owned.
    paging.is_accessible(call)
    limit, offset = paging.number(call, "limit", 20), paging.number(call, "offset", 0)
    project_id = call.request.query_params.get("project_id")
    page = await call.app.runs.page(call.owner, offset, limit, project_id)
    return reply(
        {
            "training_runs": [_run(run) for run in page.runs],
            "cursor": paging.cursor(offset, limit, page.total),
        }
    )


async def get_run(call: Call) -> Response:
    call.check_query("access_scope")
    model_id = call.request.path_params["training_run_id"]
    return reply(_run(await call.app.runs.get(call.owner, model_id, paging.is_accessible(call))))


async def unload_model(call: Call) -> Response:
    body = await call.json(messages.UnloadModel)
    return promise(await call.app.exports.unload(call.owner, body.model_id), body.model_id)


def _run(run: Run) -> dict[str, Any]:
    record = run.model
    return {
        "training_run_id": record.model_id,
        "base_model": record.base_model,
        "model_owner": record.owner,
        **lora_fields(record),
        "corrupted": record.status == "failed",
        "last_request_time": paging.time(run.last_request),
        "last_checkpoint": paging.checkpoint(run.last_checkpoint),
        "last_sampler_checkpoint": paging.checkpoint(run.last_sampler_checkpoint),
        "user_metadata": record.user_metadata,
    }
