"""What an operator looks at and does: sessions of all owners, services, base models, owners."""

from __future__ import annotations

from services.common.state.poison import Met
from services.common.state.registry import ServiceRecord
from services.gateway.administration.administration import Service
from services.gateway.administration.owners import Use
from services.gateway.edge.grpc import convert, paging
from services.gateway.edge.grpc.calls import Calls, Context
from services.gateway.identity.owner import named
from services.gateway.records.listed import Cursor
from services.gateway.records.session import SessionRecord
from tinsmith.v1 import admin_pb2

_KINDS = {
    "gateway": admin_pb2.SERVICE_KIND_GATEWAY,
    "trainer": admin_pb2.SERVICE_KIND_TRAINER,
    "sampler": admin_pb2.SERVICE_KIND_SAMPLER,
}


class ClusterCalls(Calls):
    """Methods as admin.proto describes them."""

    async def ListClusterSessions(
        self, request: admin_pb2.ListClusterSessionsRequest, context: Context
    ) -> admin_pb2.ListClusterSessionsResponse:
        page = await self._app.administration.sessions(
            named(request.owner) if request.owner else "",
            paging.entries(request.page_size),
            paging.cursor_of(request.page_token),
        )
        return admin_pb2.ListClusterSessionsResponse(
            sessions=[_session(record, models) for record, models in page.sessions],
            total=page.total,
            next_page_token=paging.token_of(page.next),
        )

    async def EndSession(
        self, request: admin_pb2.EndSessionRequest, context: Context
    ) -> admin_pb2.EndSessionResponse:
        record = await self._app.administration.session(request.session_id)
        detail = f"ended by {self._owner(context)}: {request.detail}"
        await self._app.finish_session(record.owner, record.session_id, "interrupted", detail)
        return admin_pb2.EndSessionResponse()

    async def ListServices(
        self, request: admin_pb2.ListServicesRequest, context: Context
    ) -> admin_pb2.ListServicesResponse:
        found = await self._app.administration.services()
        after, most = _name(request.page_token), paging.entries(request.page_size)
        later = [one for one in found if not after or _place(one) > after]
        return admin_pb2.ListServicesResponse(
            services=[_service(one) for one in later[:most]],
            next_page_token=_token(_place(later[most - 1]) if len(later) > most else ""),
        )

    async def DrainService(
        self, request: admin_pb2.DrainServiceRequest, context: Context
    ) -> admin_pb2.DrainServiceResponse:
        record = await self._app.administration.drain(request.id)
        return admin_pb2.DrainServiceResponse(models=record.models, queued=record.queued)

    async def UndrainService(
        self, request: admin_pb2.UndrainServiceRequest, context: Context
    ) -> admin_pb2.UndrainServiceResponse:
        await self._app.administration.undrain(request.id)
        return admin_pb2.UndrainServiceResponse()

    async def RetireBaseModel(
        self, request: admin_pb2.RetireBaseModelRequest, context: Context
    ) -> admin_pb2.RetireBaseModelResponse:
        await self._app.administration.retire(request.base_model)
        return admin_pb2.RetireBaseModelResponse()

    async def ListUnreadable(
        self, request: admin_pb2.ListUnreadableRequest, context: Context
    ) -> admin_pb2.ListUnreadableResponse:
        found, more = await self._app.administration.set_aside(
            paging.entries(request.page_size), _name(request.page_token)
        )
        return admin_pb2.ListUnreadableResponse(
            unreadable=[_unreadable(met) for met in found],
            next_page_token=_token(found[-1].name if more else ""),
        )

    async def DropUnreadable(
        self, request: admin_pb2.DropUnreadableRequest, context: Context
    ) -> admin_pb2.DropUnreadableResponse:
        removed = await self._app.administration.drop_set_aside(request.name)
        return admin_pb2.DropUnreadableResponse(removed=removed)

    async def ListOwners(
        self, request: admin_pb2.ListOwnersRequest, context: Context
    ) -> admin_pb2.ListOwnersResponse:
        found, more = await self._app.administration.owners(
            paging.entries(request.page_size), _name(request.page_token)
        )
        most = self._app.limits.owners
        return admin_pb2.ListOwnersResponse(
            owners=[_use(one) for one in found],
            limits=admin_pb2.OwnerLimits(
                sessions=most.sessions,
                models=most.models,
                checkpoints=most.checkpoints,
                checkpoint_bytes=most.checkpoint_bytes,
                requests_per_second=most.requests_per_second,
                calls=most.calls,
                downloads=most.downloads,
            ),
            next_page_token=_token(found[-1].owner if more else ""),
        )


def _name(token: str) -> str:
    """Where the page before ended, in a list by name; empty: the first page is asked for."""
    cursor = paging.cursor_of(token)
    return "" if cursor is None else cursor.name


def _token(name: str) -> str:
    return paging.token_of(Cursor(0.0, name) if name else None)


def _place(service: Service) -> str:
    return f"{_KINDS[service.kind]} {service.id}"


def _session(record: SessionRecord, models: int) -> admin_pb2.ClusterSession:
    told = admin_pb2.ClusterSession(
        session_id=record.session_id,
        owner=record.owner,
        over=record.finished,
        project_id=record.project_id,
        display_name=record.display_name,
        sdk_version=record.sdk_version,
        models=models,
    )
    convert.set_time(told.created_at, record.created_at)
    convert.set_time(told.last_heard_of_at, record.last_heartbeat)
    return told


def _service(service: Service) -> admin_pb2.Service:
    told = admin_pb2.Service(id=service.id, kind=_KINDS[service.kind], drained=service.drained)
    record: ServiceRecord | None = service.record
    if record is not None:
        told.alive, told.ready = True, record.state == "ready"
        told.address, told.base_model = record.address, record.base_model
        told.models, told.queued = record.models, record.queued
    return told


def _unreadable(met: Met) -> admin_pb2.Unreadable:
    told = admin_pb2.Unreadable(name=met.name, reason=met.reason, count=met.count)
    convert.set_time(told.last_met_at, met.last)
    return told


def _use(use: Use) -> admin_pb2.OwnerUse:
    return admin_pb2.OwnerUse(
        owner=use.owner,
        sessions=use.sessions,
        models=use.models,
        checkpoints=use.checkpoints,
        checkpoint_bytes=use.checkpoint_bytes,
        waiting_operations=use.waiting_operations,
        state_bytes=use.state_bytes,
        snapshot_bytes=use.snapshot_bytes,
    )
