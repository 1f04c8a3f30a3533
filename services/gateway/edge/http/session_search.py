"""HTTP: lists and search of sessions, and their timelines."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from services.common.contract.errors import InvalidRequest, PermissionDenied
from services.common.process import clock
from services.gateway.application import Application
from services.gateway.edge.http.codec import messages, paging
from services.gateway.edge.http.routes import Call, reply
from services.gateway.records.listed import Cursor
from services.gateway.records.session import SessionRecord
from services.gateway.sessions.search import FoundSession, SessionQuery, status_of
from services.gateway.timelines.perfetto import trace_of

TRACES = "traces"
"""Where the timelines of sessions are, below the API."""


async def list_sessions(call: Call) -> Response:
    call.check_query("limit", "offset", "access_scope")
    paging.is_accessible(call)
    limit, offset = paging.number(call, "limit", 20), paging.number(call, "offset", 0)
    return reply({"sessions": await call.app.session_search.page(call.owner, offset, limit)})


async def get_session(call: Call) -> Response:
    call.check_query("access_scope")
    paging.is_accessible(call)
    found = await call.app.session_search.details(call.owner, call.request.path_params["session_id"])
    return reply(
        {
            "training_run_ids": found.model_ids,
            "sampler_ids": found.sampling_session_ids,
            "user_metadata": _metadata(found.record),
            "display_name": found.record.display_name or None,
        }
    )


async def assign_project(call: Call) -> Response:
    body = await call.json(messages.AssignProject)
    session_id = call.request.path_params["session_id"]
    await call.app.session_search.assign_project(call.owner, session_id, body.project_id)
    return reply({})


async def search(call: Call) -> Response:
    async with call.read(messages.SearchSessions) as body, call.app.page_turns.held(call.owner):
        if isinstance(body.owner, messages.OfUsers) and set(body.owner.owner_urns) != {call.owner}:
            raise PermissionDenied(f"only your own sessions can be searched; you are {call.owner!r}")
        page = await call.app.session_search.search(call.owner, _query(body))
        answer: dict[str, Any] = {"sessions": [_summary(found) for found in page.found]}
        if page.next is not None:
            created_at = paging.time(page.next.created_at)
            answer["next_cursor"] = {"last_created_at": created_at, "last_session_id": page.next.name}
        return reply(answer)


async def trace_export(call: Call) -> Response:
    session_id = call.request.path_params["session_id"]
    await call.app.session_search.details(call.owner, session_id)
    path = f"{TRACES}/{session_id}"
    signed, _ = await call.app.signed_urls.sign(call.caller, {session_id: path})
    # It is made when it is fetched.
    return reply({"status": "ready", "url": call.reached(signed[session_id])})


async def download_trace(application: Application, request: Request) -> Response:
    """The timeline of a session as a Perfetto trace. The signature takes the place of the API key."""
    session_id, query = request.path_params["session_id"], request.query_params
    signed = (query.get(part, "") for part in ("expires", "key", "signature"))
    owner = await application.signed_urls.owner(f"{TRACES}/{session_id}", *signed)
    await application.session_search.details(owner, session_id)
    with application.gate.download(owner):
        events = await application.timelines.of(session_id)
        trace = await application.turns.run(owner, trace_of, session_id, events)
    headers = {
        "content-disposition": f'attachment; filename="{session_id}.pftrace"',
        "cache-control": "private, no-store",
        "x-content-type-options": "nosniff",
    }
    return Response(trace, headers=headers, media_type="application/octet-stream")


def _query(body: messages.SearchSessions) -> SessionQuery:
    after = None
    if body.cursor is not None:
        try:
            created_at = datetime.fromisoformat(body.cursor.last_created_at)
        except ValueError as error:
            raise InvalidRequest(
                "cursor.last_created_at is not a time; pass next_cursor back as it is"
            ) from error
        after = Cursor(created_at.timestamp(), body.cursor.last_session_id)
    statuses = None
    if body.statuses is not None:
        statuses = {
            status.kind: status.reasons if isinstance(status, messages.ClientFinished) else None
            for status in body.statuses
        }
    return SessionQuery(
        session_id=body.session_id,
        display_name=body.display_name,
        project_ids=body.project_ids,
        user_metadata=body.user_metadata,
        statuses=statuses,
        limit=body.limit,
        after=after,
    )


def _summary(found: FoundSession) -> dict[str, Any]:
    record = found.record
    return {
        "session_id": record.session_id,
        "created_at": paging.time(record.created_at),
        "owner": record.owner,
        "project_id": record.project_id,
        "status": _status(record),
        "checkpoints_count": found.checkpoints,
        "display_name": record.display_name or None,
        "user_metadata": _metadata(record),
        "checkpoint_storage_bytes": found.checkpoint_bytes,
    }


def _status(record: SessionRecord) -> dict[str, Any] | None:
    kind = status_of(record, clock.to_judge())
    if kind is None:
        return None
    if kind == "cancelled":
        return {"type": kind, "detail": "nothing was heard of the session for long"}
    if kind == "client_finished":
        reason = {"type": record.finish_reason or "success"}
        return {"type": kind, "reason": reason, "detail": record.finish_detail or None}
    return {"type": kind}


def _metadata(record: SessionRecord) -> dict[str, str]:
    return {key: str(value) for key, value in record.user_metadata.items()}
