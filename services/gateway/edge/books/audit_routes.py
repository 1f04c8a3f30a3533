"""HTTP: who did what."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import Any

from starlette.responses import Response

from services.common.contract.errors import InvalidRequest
from services.gateway.audit.pages import MOST_BYTES, MOST_LOOKED, Window, place_of, token_of
from services.gateway.audit.record import RESOURCES, AuditRecord, of_type
from services.gateway.edge.http.codec import paging
from services.gateway.edge.http.routes import Call, reply

_MOST_OF_DAY = 5000
"""Records of a day that are answered as a whole."""


async def audit(call: Call) -> Response:
    """The records of a day, oldest first: a page of them, or all."""
    call.check_query("event_type", "day", "limit", "cursor", "owner")
    query = call.request.query_params
    event_type = query.get("event_type", "all")
    if event_type not in RESOURCES:
        known = ", ".join(RESOURCES)
        raise InvalidRequest(
            f"event_type must be one of {known}, not {event_type[:50]!r}", field="event_type"
        )
    begin = _day(query.get("day"))
    most = paging.number(call, "limit", 0)
    if "limit" in query and not 1 <= most <= _MOST_OF_DAY:
        raise InvalidRequest(f"limit must be 1 to {_MOST_OF_DAY}, not {most}", field="limit")
    page = await call.app.audit_store.page(
        call.app.audited(call.caller, query.get("owner", "")),
        Window(begin.timestamp(), (begin + timedelta(days=1)).timestamp()),
        most or _MOST_OF_DAY,
        place_of(query.get("cursor", ""), "cursor"),
        of_type(event_type),
        newest_first=False,
    )
    if page.next is not None and not most:
        raise InvalidRequest(
            f"that day has more records than one answer holds ({_MOST_OF_DAY}, or {MOST_BYTES} bytes, or "
            f"what is found among {MOST_LOOKED} of all kinds); ask for pages of them with limit and cursor, "
            "or over gRPC with ListAuditRecords",
            "too_many_records",
        )
    answer: dict[str, Any] = {"entries": [_entry(record) for record in page.records]}
    if page.next is not None:
        answer["next_cursor"] = token_of(page.next)
    return reply(answer)


def _day(text: str | None) -> datetime:
    """Its beginning, UTC; None: today."""
    try:
        found = date.fromisoformat(text) if text is not None else datetime.now(UTC).date()
    except ValueError as error:
        raise InvalidRequest(
            f"day must be such as 2026-01-31, not {(text or '')[:50]!r}", field="day"
        ) from error
    # A day after the last one cannot be told.
    if not 1970 <= found.year < 9999:
        raise InvalidRequest(f"day must be of 1970 or later, not {found}", field="day")
    return datetime(found.year, found.month, found.day, tzinfo=UTC)


def _entry(record: AuditRecord) -> dict[str, Any]:
    """A record as the SDK reads it."""
    details: dict[str, Any] = {
        "id": record.id,
        "outcome": record.outcome,
        "owner": record.owner,
        "key_id": record.key_id,
        "method": record.method,
        "object": record.object,
        "address": record.address,
        "trace_id": record.trace_id,
        "request_id": record.request_id,
        "count": record.count,
        "details": record.details,
    }
    entry = {"timestamp": paging.time(record.at), "event": record.event, "event_details": details}
    if record.object.startswith("tinker://"):
        model_id = record.object.removeprefix("tinker://").partition("/")[0]
        entry |= {"model_id": model_id, "tinker_path": record.object}
    return entry
