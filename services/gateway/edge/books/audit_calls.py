"""gRPC: who did what."""

from __future__ import annotations

import math

from google.protobuf.timestamp_pb2 import Timestamp

from services.gateway.audit.pages import Window, place_of, token_of
from services.gateway.audit.record import AuditRecord, of_events
from services.gateway.edge.grpc import paging
from services.gateway.edge.grpc.calls import Calls, Context
from tinsmith.v1 import audit_pb2


class AuditCalls(Calls):
    """Methods as service.proto describes them."""

    async def ListAuditRecords(
        self, request: audit_pb2.ListAuditRecordsRequest, context: Context
    ) -> audit_pb2.ListAuditRecordsResponse:
        most = paging.entries(request.page_size)
        window = Window(
            _seconds(request.start_time) if request.HasField("start_time") else 0.0,
            _seconds(request.end_time) if request.HasField("end_time") else math.inf,
        )
        page = await self._app.audit_store.page(
            self._app.audited(self._caller(context), request.owner),
            window,
            most,
            place_of(request.page_token, "page_token"),
            of_events(request.event_prefix),
            newest_first=True,
        )
        return audit_pb2.ListAuditRecordsResponse(
            records=[_told(record) for record in page.records], next_page_token=token_of(page.next)
        )


def _seconds(time: Timestamp) -> float:
    return time.seconds + time.nanos / 1e9


def _told(record: AuditRecord) -> audit_pb2.AuditRecord:
    told = audit_pb2.AuditRecord(
        id=record.id,
        event=record.event,
        outcome=record.outcome,
        owner=record.owner,
        key_id=record.key_id,
        method=record.method,
        object=record.object,
        address=record.address,
        trace_id=record.trace_id,
        request_id=record.request_id,
        details=record.details,
        count=record.count,
    )
    told.time.FromMicroseconds(round(record.at * 1e6))
    return told
