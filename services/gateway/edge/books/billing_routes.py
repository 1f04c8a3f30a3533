"""HTTP: what was used, and what is stored, as the SDK reads it. Nothing here costs money."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta
from typing import Any

from starlette.responses import Response

from services.common.contract.errors import InvalidRequest
from services.common.state.journal_records import (
    CACHED,
    PREFILLED,
    SAMPLED,
    SAVED,
    SAVED_BYTES,
    STORED,
    TRAINED,
)
from services.gateway.edge.http.routes import Call, reply
from services.gateway.records.session import SessionRecord
from services.gateway.records.usage import Used

_MOST_DAYS = 14
_GB = 1e9
_TOKENS: dict[str, dict[str, Any]] = {
    TRAINED: {"type": "training"},
    PREFILLED: {"type": "sampling_prefill", "cached": False},
    CACHED: {"type": "sampling_prefill", "cached": True},
    SAMPLED: {"type": "sampling_sample"},
}


async def usage(call: Call) -> Response:
    """What was used on some days, by run and day: the caller's own; for admins everybody's, or an owner's."""
    call.check_query("starting_on", "ending_before", "owner")
    begin, end = _midnight(call, "starting_on"), _midnight(call, "ending_before")
    days = (end - begin).days
    if not 1 <= days <= _MOST_DAYS:
        raise InvalidRequest(
            f"ending_before must be 1 to {_MOST_DAYS} days after starting_on, not {days}",
            field="ending_before",
        )
    if begin.timestamp() > time.time():
        raise InvalidRequest("starting_on is in the future", field="starting_on")
    found = await call.app.use.used(_asked(call), begin.date(), days)
    known = await call.app.use.sessions({one.session for one in found})
    rows = sorted(
        _events(found, known), key=lambda row: (row["bucket_start"], -row["event_info"].get("token_count", 0))
    )
    sessions = {name: {"user_metadata": _metadata(record)} for name, record in known.items()}
    return reply({"data": rows, "sessions": sessions, "cost_data_through": None})


async def storage(call: Call) -> Response:
    """What checkpoints take now, by project and owner."""
    call.check_query("project_id", "owner")
    wanted = call.request.query_params.get("project_id")
    found = await call.app.use.stored(_asked(call))
    rows = [
        {
            "project_id": one.project_id or None,
            "org_user_urn": one.owner,
            "user_name": one.owner,
            "checkpoint_count": one.checkpoints,
            "size_bytes": one.size_bytes,
            "size_gigabytes": one.size_bytes / _GB,
        }
        for one in found
        if wanted is None or one.project_id == wanted
    ]
    return reply({"effective_rate_usd_per_gigabyte_month": None, "data": rows})


def _asked(call: Call) -> str | None:
    """Whose use is told; None: everybody's. Raises as `Application.audited`."""
    return call.app.audited(call.caller, call.request.query_params.get("owner", ""))


def _midnight(call: Call, name: str) -> datetime:
    """A time of the query that a day begins with, UTC.

    Raises:
        InvalidRequest: it is none.
    """
    text = call.request.query_params.get(name, "")
    try:
        found = datetime.fromisoformat(text)
        found = (found if found.tzinfo else found.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise InvalidRequest(
            f"{name} must be such as 2026-01-31T00:00:00Z, not {text[:50]!r}", field=name
        ) from error
    if found.timetz() != datetime.min.replace(tzinfo=UTC).timetz() or not 1970 <= found.year < 9999:
        raise InvalidRequest(
            f"this cluster counts by day, so {name} must be a midnight, UTC, not {text[:50]!r}", field=name
        )
    return found


def _events(found: Iterable[Used], known: dict[str, SessionRecord]) -> Iterable[dict[str, Any]]:
    sizes = {one[:2] + one[3:6]: one.amount for one in found if one.kind == SAVED_BYTES}
    byte_hours: dict[tuple[str, date], int] = defaultdict(int)
    for one in found:
        info: dict[str, Any] | None = None
        if one.kind in _TOKENS:
            info = {**_TOKENS[one.kind], "token_count": one.amount}
        elif one.kind == SAVED:
            info = {"type": "checkpoint", "count": one.amount, "size_bytes": sizes.get(one[:2] + one[3:6], 0)}
        elif one.kind == STORED:
            byte_hours[one.owner, one.day] += one.amount
        if info is not None:
            yield _event(one.owner, one.day, info, one, known.get(one.session))
    for (owner, day), amount in byte_hours.items():
        yield _event(owner, day, {"type": "storage", "free": False, "gigabyte_hours": amount / _GB})


def _event(
    owner: str,
    day: date,
    info: dict[str, Any],
    used: Used | None = None,
    session: SessionRecord | None = None,
) -> dict[str, Any]:
    begin = datetime(day.year, day.month, day.day, tzinfo=UTC)
    return {
        "bucket_start": begin.isoformat(),
        "bucket_end": (begin + timedelta(days=1)).isoformat(),
        "base_model": (used and used.base_model) or None,
        "user_id": owner,
        "user_name": owner,
        "session_id": (used and used.session) or None,
        "project_id": (session and session.project_id) or None,
        # The SDK passes over what it does not know.
        "training_run_id": (used and used.run) or None,
        "event_info": info,
    }


def _metadata(record: SessionRecord) -> dict[str, str] | None:
    return {key: str(value) for key, value in record.user_metadata.items()} or None
