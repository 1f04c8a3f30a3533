"""API keys: made, listed, ended."""

from __future__ import annotations

import time
from collections.abc import Sequence

from google.protobuf.duration_pb2 import Duration

from services.common.contract.errors import InvalidRequest
from services.gateway.edge.grpc import paging
from services.gateway.edge.grpc.calls import Calls, Context
from services.gateway.identity.key import KeyRecord, Rights
from services.gateway.records.listed import Cursor
from tinsmith.v1 import admin_pb2

_LONGEST_S = 100 * 366 * 86400
_ROLES: dict[admin_pb2.KeyRole.ValueType, str] = {
    admin_pb2.KEY_ROLE_USER: "user",
    admin_pb2.KEY_ROLE_READ: "read",
    admin_pb2.KEY_ROLE_ADMIN: "admin",
}
_SCOPES: dict[admin_pb2.KeyScope.ValueType, str] = {
    admin_pb2.KEY_SCOPE_TRAIN: "train",
    admin_pb2.KEY_SCOPE_SAMPLE: "sample",
    admin_pb2.KEY_SCOPE_CHECKPOINTS: "checkpoints",
}
_ROLES_OUT = {name: number for number, name in _ROLES.items()}
_SCOPES_OUT = {name: number for number, name in _SCOPES.items()}


class KeyCalls(Calls):
    """Methods as admin.proto describes them."""

    async def CreateKey(
        self, request: admin_pb2.CreateKeyRequest, context: Context
    ) -> admin_pb2.CreateKeyResponse:
        record, key = await self._app.key_store.create(_rights(request, time.time()))
        return admin_pb2.CreateKeyResponse(key=key, api_key=_told(record))

    async def ListKeys(
        self, request: admin_pb2.ListKeysRequest, context: Context
    ) -> admin_pb2.ListKeysResponse:
        most = paging.entries(request.page_size)
        after = paging.cursor_of(request.page_token)
        kept = [
            one for one in await self._app.key_store.all() if after is None or _place(one) > _after(after)
        ]
        # Those of the file come with the first page, and are few.
        of_file = self._app.keys.of_file if after is None else []
        page, used = kept[:most], await self._app.key_store.used()
        return admin_pb2.ListKeysResponse(
            keys=[
                *(_told(one, in_file=True) for one in of_file),
                *(_told(one, used.get(one.id)) for one in page),
            ],
            next_page_token=paging.token_of(Cursor(*_place(page[-1])) if len(kept) > most else None),
        )

    async def RevokeKey(
        self, request: admin_pb2.RevokeKeyRequest, context: Context
    ) -> admin_pb2.RevokeKeyResponse:
        await self._app.key_store.revoke(request.id)
        return admin_pb2.RevokeKeyResponse()

    async def RotateKey(
        self, request: admin_pb2.RotateKeyRequest, context: Context
    ) -> admin_pb2.RotateKeyResponse:
        keep = _seconds(request.keep_old, "keep_old") if request.HasField("keep_old") else 0.0
        record, key = await self._app.key_store.rotate(request.id, keep)
        return admin_pb2.RotateKeyResponse(key=key, api_key=_told(record))


def _rights(request: admin_pb2.CreateKeyRequest, now: float) -> Rights:
    role = request.role or admin_pb2.KEY_ROLE_USER
    if role not in _ROLES:
        raise InvalidRequest(f"role {role} is not one of KeyRole", field="role")
    until = now + _seconds(request.lifetime, "lifetime") if request.HasField("lifetime") else None
    return Rights(request.owner, _ROLES[role], _scopes(request.scopes), until, request.note)


def _scopes(asked: Sequence[admin_pb2.KeyScope.ValueType]) -> tuple[str, ...]:
    for scope in asked:
        if scope not in _SCOPES:
            raise InvalidRequest(f"scope {scope} is not one that a key can have", field="scopes")
    return tuple(_SCOPES[scope] for scope in asked)


def _seconds(duration: Duration, field: str) -> float:
    found = duration.seconds + duration.nanos / 1e9
    if not 0 < found <= _LONGEST_S:
        raise InvalidRequest(f"{field} must be more than 0 s and at most {_LONGEST_S} s", field=field)
    return found


def _place(record: KeyRecord) -> tuple[float, str]:
    return record.created_at, record.id


def _after(cursor: Cursor) -> tuple[float, str]:
    return cursor.created_at, cursor.name


def _told(record: KeyRecord, used: float | None = None, in_file: bool = False) -> admin_pb2.ApiKey:
    told = admin_pb2.ApiKey(
        id=record.id,
        owner=record.owner,
        role=_ROLES_OUT[record.role],
        scopes=[_SCOPES_OUT[scope] for scope in record.scopes],
        note=record.note,
        in_file=in_file,
    )
    if not in_file:
        told.created_at.FromMicroseconds(round(record.created_at * 1e6))
    if record.expires_at is not None:
        told.expires_at.FromMicroseconds(round(record.expires_at * 1e6))
    if used is not None:
        told.last_used_at.FromSeconds(int(used))
    return told
