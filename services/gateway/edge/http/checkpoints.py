"""HTTP: checkpoints, and the downloads of exports."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from services.common.contract import ids
from services.common.contract.errors import InvalidRequest, NotFound
from services.common.storage.base import Key
from services.gateway.application import Application
from services.gateway.checkpoints.downloads import Download
from services.gateway.edge.http.codec import messages, paging, sdk_versions
from services.gateway.edge.http.routes import Call, numbered, promise, reply
from services.gateway.edge.http.training import lora_fields, reader
from services.gateway.records.checkpoint import CheckpointRecord
from services.gateway.training.copies import Wanted

DOWNLOADS = "downloads"
"""Where signed files are, below the API."""
_VERSION = re.compile("[0-9]{1,18}")


async def weights_info(call: Call) -> Response:
    body = await call.json(messages.WeightsInfo)
    record = await call.app.checkpoints.readable(call.owner, *ids.parse_tinker_path(body.tinker_path))
    return reply(
        {
            "base_model": record.base_model,
            "optimizer_config": {"type": "adamw"},
            **lora_fields(record),
            "train_attn": record.train_attn,
            "train_mlp": record.train_mlp,
            "train_unembed": record.train_unembed,
        }
    )


async def save_weights_external(call: Call) -> Response:
    async def accept(body: messages.SaveWeightsExternal) -> Response:
        request_id = await call.app.exports.save(
            call.owner,
            body.model_id,
            body.seq_id,
            body.path,
            body.ttl_seconds,
            body.age_encryption_recipients or (),
        )
        return promise(request_id, body.model_id)

    return await numbered(call, messages.SaveWeightsExternal, accept)


async def list_all(call: Call) -> Response:
    call.check_query("limit", "offset")
    limit, offset = paging.number(call, "limit", 100), paging.number(call, "offset", 0)
    page = await call.app.checkpoints.page(call.owner, offset, limit)
    return reply(
        {
            "checkpoints": _listed(call, page.records),
            "cursor": paging.cursor(offset, limit, page.total),
        }
    )


async def list_of_run(call: Call) -> Response:
    call.check_query()
    records = await call.app.checkpoints.of_model(call.owner, call.request.path_params["training_run_id"])
    return reply({"checkpoints": _listed(call, list(reversed(records)))})


def _listed(call: Call, records: Sequence[CheckpointRecord]) -> list[dict[str, Any] | None]:
    """Checkpoints as the client's SDK can read them: one that has no word for exports could read none."""
    exports = sdk_versions.knows_exports(call.request.headers.get("x-stainless-package-version", ""))
    return [paging.checkpoint(record) for record in records if exports or record.kind != "external"]


async def delete(call: Call) -> Response:
    await call.app.checkpoints.delete(call.owner, *_name(call))
    return reply({})


async def publish(call: Call) -> Response:
    await call.app.checkpoints.set_public(call.owner, *_name(call), public=True)
    return reply({})


async def unpublish(call: Call) -> Response:
    await call.app.checkpoints.set_public(call.owner, *_name(call), public=False)
    return reply({})


async def set_ttl(call: Call) -> Response:
    body = await call.json(messages.SetTtl)
    await call.app.checkpoints.set_ttl(call.owner, *_name(call), body.ttl_seconds)
    return reply({})


async def external_weights_urls(call: Call) -> Response:
    signed = await call.app.downloads.sign(call.caller, *_name(call))
    base = call.reached(DOWNLOADS)
    return reply(
        {
            "urls": {name: f"{base}/{path}" for name, path in signed.paths.items()},
            "expires": paging.time(signed.expires),
        }
    )


async def copy_weights(call: Call) -> Response:
    body = await call.json(messages.CopyWeights)
    headers, copies = call.request.headers, call.app.copies
    token = body.weights_access_token or headers.get("x-tinker-weights-access-token")
    wanted = Wanted(body.source_path, body.ttl_seconds, await reader(call, token))
    if body.session_id is not None and body.model_seq_id is not None and body.destination_project_id is None:
        path = await copies.into_session(call.owner, wanted, body.session_id, body.model_seq_id)
    elif body.destination_project_id is not None and body.session_id is body.model_seq_id is None:
        key = headers.get("x-idempotency-key")
        path = await copies.into_project(call.owner, wanted, body.destination_project_id, key)
    else:
        raise InvalidRequest("pass destination_project_id, or session_id and model_seq_id")
    return reply({"tinker_path": path})


async def download(application: Application, request: Request) -> Response:
    """Serves a signed file. The signature takes the place of the API key."""
    params, query = request.path_params, request.query_params
    if _VERSION.fullmatch(params["version"]) is None:
        raise NotFound("there is no such file; ask for the URL again")
    key = Key(params["training_run_id"], f"{params['kind']}/{params['name']}", int(params["version"]))
    signed = (query.get(part, "") for part in ("expires", "key", "signature"))
    found = await application.downloads.open(key, params["file"], *signed)
    headers = {
        "content-length": str(found.size),
        "content-disposition": "attachment",
        "cache-control": "private, no-store",
        "x-content-type-options": "nosniff",
    }
    return Sending(found, headers, "application/octet-stream")


class Sending(StreamingResponse):
    """The answer with a file, which it closes, also when it was never begun."""

    def __init__(self, found: Download, headers: dict[str, str], media_type: str) -> None:
        super().__init__(found.pieces(), headers=headers, media_type=media_type)
        self._found = found

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._found.close()


def _name(call: Call) -> tuple[str, str]:
    """(model id, checkpoint id) of the path."""
    params = call.request.path_params
    return params["training_run_id"], f"{params['kind']}/{params['name']}"
