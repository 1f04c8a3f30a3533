"""API keys over AdminService, and what becomes of those who use them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration

from services.common.process import rpc
from services.gateway.edge.admin import keys as admin_keys
from tests.unit.gateway.edges import ALICE, ROOT, Edges
from tinsmith.v1 import admin_pb2, admin_pb2_grpc, models_pb2, service_pb2_grpc


@pytest.fixture
async def channel(edges: Edges) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(edges.grpc_address) as found:
        yield found


def using(key: str) -> dict[str, Any]:
    return {"metadata": (("x-api-key", key),), "timeout": 20}


async def refusal(call: Awaitable[object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), str(dict(caught.value.trailing_metadata() or ()).get(rpc.CODE_METADATA))


async def test_a_key_is_made_used_rotated_and_revoked(edges: Edges, channel: grpc.aio.Channel) -> None:
    admin, user = admin_pb2_grpc.AdminServiceStub(channel), service_pb2_grpc.TinsmithServiceStub(channel)
    asked = admin_pb2.CreateKeyRequest(
        owner="carol",
        role=admin_pb2.KEY_ROLE_READ,
        scopes=[admin_pb2.KEY_SCOPE_TRAIN],
        lifetime=Duration(seconds=3600),
        note="ci",
    )
    made = await admin.CreateKey(asked, **using(ROOT))
    assert made.key.startswith(f"tml-{made.api_key.id}-")
    lasts = made.api_key.expires_at.ToSeconds() - made.api_key.created_at.ToSeconds()
    assert 3599 <= lasts <= 3601
    await edges.app.keys.look()
    await user.ListModels(models_pb2.ListModelsRequest(), **using(made.key))

    rotated = await admin.RotateKey(admin_pb2.RotateKeyRequest(id=made.api_key.id), **using(ROOT))
    assert (rotated.api_key.owner, rotated.api_key.note) == ("carol", "ci")
    assert rotated.api_key.scopes == [admin_pb2.KEY_SCOPE_TRAIN]
    await edges.app.keys.look()
    old = await refusal(user.ListModels(models_pb2.ListModelsRequest(), **using(made.key)))
    assert old == (grpc.StatusCode.UNAUTHENTICATED, "unauthenticated")

    listed = await admin.ListKeys(admin_pb2.ListKeysRequest(), **using(ROOT))
    assert [one.id for one in listed.keys if not one.in_file] == [rotated.api_key.id]
    assert {one.owner for one in listed.keys if one.in_file} == {"alice", "bob", "root"}
    assert rotated.key.rpartition("-")[2] not in str(listed)

    revoke = admin_pb2.RevokeKeyRequest(id=rotated.api_key.id)
    await admin.RevokeKey(revoke, **using(ROOT))
    await edges.app.keys.look()
    assert (await refusal(user.ListModels(models_pb2.ListModelsRequest(), **using(rotated.key))))[0] is (
        grpc.StatusCode.UNAUTHENTICATED
    )
    assert (await refusal(admin.RevokeKey(revoke, **using(ROOT))))[0] is grpc.StatusCode.NOT_FOUND


async def test_only_admins_make_keys(edges: Edges, channel: grpc.aio.Channel) -> None:
    admin = admin_pb2_grpc.AdminServiceStub(channel)
    found = await refusal(admin.CreateKey(admin_pb2.CreateKeyRequest(owner="x"), **using(ALICE)))
    assert found == (grpc.StatusCode.PERMISSION_DENIED, "role_missing")
    assert not await edges.app.key_store.all()


async def test_keys_come_in_pages_of_which_none_repeats_or_leaves_out(
    edges: Edges, channel: grpc.aio.Channel
) -> None:
    admin = admin_pb2_grpc.AdminServiceStub(channel)
    for _ in range(5):
        await admin.CreateKey(admin_pb2.CreateKeyRequest(owner="carol"), **using(ROOT))
    found, token = [], ""
    while True:
        asked = admin_pb2.ListKeysRequest(page_size=2, page_token=token)
        page = await admin.ListKeys(asked, **using(ROOT))
        found += [one.id for one in page.keys if not one.in_file]
        token = page.next_page_token
        if not token:
            break
    assert found == [one.id for one in await edges.app.key_store.all()]
    assert len(found) == 5


@pytest.mark.parametrize(
    "request_of",
    [
        admin_pb2.CreateKeyRequest(owner="a b"),
        admin_pb2.CreateKeyRequest(owner="a", scopes=[admin_pb2.KEY_SCOPE_UNSPECIFIED]),
        admin_pb2.CreateKeyRequest(owner="a", lifetime=Duration(seconds=-1)),
        admin_pb2.CreateKeyRequest(owner="a", lifetime=Duration(seconds=10**11)),
        admin_pb2.CreateKeyRequest(owner="a", note="x" * 201),
    ],
)
async def test_a_key_that_cannot_be_is_refused(
    channel: grpc.aio.Channel, request_of: admin_pb2.CreateKeyRequest
) -> None:
    admin = admin_pb2_grpc.AdminServiceStub(channel)
    assert (await refusal(admin.CreateKey(request_of, **using(ROOT))))[0] is (
        grpc.StatusCode.INVALID_ARGUMENT
    )


async def test_a_running_gateway_lets_a_new_key_in_and_a_revoked_one_no_more_by_itself(edges: Edges) -> None:
    ring, store = edges.app.keys, edges.app.key_store
    await ring.start()
    try:
        record, key = await store.create(admin_keys.Rights("carol"))
        async with edges.http(key) as client:

            async def until(status: int) -> None:
                async with asyncio.timeout(60):
                    while True:
                        if (await client.get("get_server_capabilities")).status_code == status:
                            return
                        await asyncio.sleep(0.1)

            await until(200)
            await store.revoke(record.id)
            await until(401)
    finally:
        await ring.stop()
