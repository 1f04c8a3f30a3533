"""HTTP: start-up, sessions and what the cluster serves."""

from __future__ import annotations

import hashlib
from pathlib import PurePath

from starlette.requests import Request
from starlette.responses import Response

from services.common.contract.errors import NotFound, PermissionDenied
from services.gateway.cluster.base_models import BaseModel
from services.gateway.edge.http.codec import messages, sdk_versions
from services.gateway.edge.http.routes import Call, reply
from services.gateway.sessions.sessions import NewSession

CLIENT_CONFIG = {
    # Keys are sent as they are, but by the SDKs that know who they are from a token alone.
    "pjwt_auth_enabled": False,
    "credential_default_source": "api_key",
    # All chunks of a batch are in the journal at once, so they train as one pass.
    "parallel_fwdbwd_chunks": True,
    # Without these SDKs before 0.25 train with JSON, and resume in steps that suit adapters alone.
    "proto_write_fwdbwd": True,
    "fwd_via_fwdbwd": True,
    "create_model_via_load_weights": True,
    # Compressing costs more than it saves on a local network. Compressed bodies are taken all the same.
    "proto_compress_fwdbwd": False,
    "fwdbwd_max_chunk_len": 1024,
    "fwdbwd_max_chunk_bytes_count": 5_000_000,
    "sample_max_concurrent_requests": 2000,
    # One poll per sampling client, however many of its samples wait.
    "sample_use_retrieve_futures": True,
    # Each of these needs an endpoint that this gateway does not have.
    "sample_join_sampling_session": False,
    "custom_loss_server_side": False,
}
DYNAMIC_CONFIG = {
    "refresh_interval_sec": 300,
    # A sample that nobody waits for any more gives its place in the engine back.
    "sample_cancel_enabled": True,
    "sample_cancel_max_batch_size": 64,
}


async def client_config(call: Call) -> Response:
    body = await call.json(messages.ClientConfig)
    exchanges = sdk_versions.exchanges_keys(body.sdk_version or "")
    python = call.request.headers.get("x-stainless-runtime-version", "")
    pyqwest = sdk_versions.may_use_pyqwest(python)
    return reply(CLIENT_CONFIG | {"pjwt_auth_enabled": exchanges, "use_pyqwest_transport": pyqwest})


async def client_dynamic_config(call: Call) -> Response:
    await call.json(messages.ClientConfig)
    return reply(DYNAMIC_CONFIG)


async def create_session(call: Call) -> Response:
    body = await call.json(messages.CreateSession)
    version = body.sdk_version or ""
    warning = sdk_versions.warning(version)
    new = NewSession(
        tags=body.tags,
        user_metadata=body.user_metadata,
        sdk_version=version,
        project_id=body.project_id or "",
        display_name=body.display_name or "",
    )
    key = call.request.headers.get("x-idempotency-key")
    session_id = await call.app.sessions.create(call.owner, new, key)
    said = {} if warning is None else {"warning_message": warning}
    return reply({"type": "create_session", "session_id": session_id, **said})


async def exchange_key(call: Call) -> Response:
    """A short-lived token in the place of what the call came with, whose claims `whoami` reads."""
    async with call.body():
        return reply({"jwt": call.app.keys.token_for(call.caller)})


async def own_api_key(call: Call) -> Response:
    """What `tinker auth login` stores with the key that it was given."""
    key = call.request.headers.get("x-api-key", "")
    return reply(
        {
            # An integer that JSON readers keep, and that stays while the key does.
            "key_id": int.from_bytes(hashlib.sha256(key.encode()).digest()[:6], "big"),
            "name": call.owner,
            "note": "",
            "details": {"org_details": {"name": "this cluster"}, "user_details": {"email": call.owner}},
        }
    )


async def no_login(request: Request) -> Response:
    """What clients that log in by browser ask first, before they have a key (the SDK of 0.28)."""
    raise NotFound(
        "nobody logs in to this cluster by browser: ask its operator for an API key (`tinsmith keys create "
        "OWNER` makes one), and set TINKER_API_KEY to it",
        "no_login",
    )


async def delete_own_api_key(call: Call) -> Response:
    raise PermissionDenied("the operator of this cluster keeps its API keys; ask there to have one removed")


async def session_heartbeat(call: Call) -> Response:
    body = await call.json(messages.SessionHeartbeat)
    await call.app.sessions.heartbeat(call.owner, body.session_id)
    return reply({"type": "session_heartbeat"})


async def finish_session(call: Call) -> Response:
    body = await call.json(messages.FinishSession)
    session_id = call.request.path_params["session_id"]
    await call.app.finish_session(call.owner, session_id, body.reason.type, body.detail or "")
    return reply({})


async def telemetry(call: Call) -> Response:
    """Takes the SDK's events about itself and drops them: they are meant for its maker."""
    async with call.body():
        return reply({"status": "accepted"})


def _weights(model: BaseModel) -> str | None:
    """Which weights a base model has, where its name says something else: the hub id, or that they are a
    directory's, whose place is nobody's business."""
    found = model.tokenizer_id
    if found in ("", model.name):
        return None
    return "a directory of the cluster" if PurePath(found).is_absolute() else found


async def get_server_capabilities(call: Call) -> Response:
    models = [
        {
            "model_name": model.name,
            "max_context_length": model.context_length or None,
            "trainable": model.trainable,
            "sampleable": model.sampleable,
            # The SDK passes over what it does not know.
            "weights": _weights(model),
        }
        for model in await call.app.base_models.served()
    ]
    answer: dict[str, object] = {"supported_models": models}
    if call.app.limits.stable_reinforce_as:
        answer["stable_reinforce_as"] = call.app.limits.stable_reinforce_as
    return reply(answer)
