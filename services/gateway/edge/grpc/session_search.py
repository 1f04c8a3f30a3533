"""Searches for sessions over gRPC, translated to and from the application layer's terms."""

from __future__ import annotations

from services.common.contract.errors import InvalidRequest
from services.common.process import clock
from services.gateway.edge.grpc import convert, paging
from services.gateway.sessions.search import SearchPage, SessionQuery, status_of
from tinsmith.v1 import sessions_pb2

_PAGE = 50
_MOST = 200
_STATUSES = {
    "active": sessions_pb2.SESSION_STATUS_ACTIVE,
    "client_finished": sessions_pb2.SESSION_STATUS_FINISHED,
    "cancelled": sessions_pb2.SESSION_STATUS_ABANDONED,
}
_WORDS = {number: word for word, number in _STATUSES.items()}


def query(request: sessions_pb2.SearchSessionsRequest) -> SessionQuery:
    """What to look for.

    Raises:
        InvalidRequest: a status or reason that cannot be looked for, or a page token of another making.
    """
    if not 0 <= request.page_size <= _MOST:
        message = f"page_size must be 0 to {_MOST}, not {request.page_size}"
        raise InvalidRequest(message, field="page_size")
    return SessionQuery(
        session_id=request.session_id or None,
        display_name=request.display_name or None,
        project_ids=list(request.project_ids) or None,
        user_metadata=dict(request.user_metadata),
        statuses=_statuses(request),
        limit=request.page_size or _PAGE,
        after=paging.cursor_of(request.page_token),
    )


def response(page: SearchPage) -> sessions_pb2.SearchSessionsResponse:
    """A page of sessions."""
    answer = sessions_pb2.SearchSessionsResponse()
    for found in page.found:
        record = found.record
        one = answer.sessions.add(
            session_id=record.session_id,
            status=_STATUSES.get(status_of(record, clock.to_judge()) or ""),
            display_name=record.display_name,
            project_id=record.project_id,
            user_metadata=convert.metadata(record),
            checkpoints=found.checkpoints,
            checkpoint_bytes=found.checkpoint_bytes,
        )
        convert.set_time(one.created_at, record.created_at)
    answer.next_page_token = paging.token_of(page.next)
    return answer


def _statuses(request: sessions_pb2.SearchSessionsRequest) -> dict[str, list[str] | None] | None:
    wanted = list(request.statuses)
    if any(status not in _WORDS for status in wanted):
        raise InvalidRequest("statuses may be ACTIVE, FINISHED and ABANDONED", field="statuses")
    if not request.finish_reasons:
        return {_WORDS[status]: None for status in wanted} or None
    if sessions_pb2.SESSION_STATUS_FINISHED not in wanted:
        message = "finish_reasons are of finished sessions; put FINISHED into statuses"
        raise InvalidRequest(message, field="finish_reasons")
    reasons = [convert.finish_reason(reason) for reason in request.finish_reasons]
    finished = sessions_pb2.SESSION_STATUS_FINISHED
    return {_WORDS[status]: reasons if status == finished else None for status in wanted}
