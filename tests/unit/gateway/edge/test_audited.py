"""What is done over either protocol is written down, once."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc.aio
import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from tinker import types

from services.gateway.audit.pages import Window
from services.gateway.audit.record import AuditRecord, new_id, of_type
from services.gateway.edge.books import audit_routes
from tests.unit.gateway.edges import ALICE, BOB, ROOT, Edges, new_model, new_session
from tests.unit.gateway.saved import export, save, url
from tinsmith.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    audit_pb2,
    checkpoints_pb2,
    models_pb2,
    service_pb2_grpc,
    sessions_pb2,
)


async def records(edges: Edges, owner: str | None = None) -> list[AuditRecord]:
    """Those of an owner, or all; in the order in which they were made."""
    await edges.app.audit.tell_refusals()
    await edges.app.audit.flush()
    store, wanted = edges.app.audit_store, of_type("all")
    page = await store.page(owner, Window(), 1000, None, wanted, False)
    return sorted(page.records, key=lambda one: one.at)


def told(found: list[AuditRecord]) -> list[tuple[str, str, str]]:
    return [(one.event, one.object, one.outcome) for one in found]


async def test_what_is_done_over_http(edges: Edges) -> None:
    async with edges.http() as client, edges.http(BOB) as other:
        session = await new_session(client)
        model = await new_model(edges, client, session)
        path = await save(edges, client, model, 1, "a")
        place = path.removeprefix("tinker://").replace("/", "/checkpoints/", 1)
        await client.put(f"training_runs/{place}/ttl", json={"ttl_seconds": 7200})
        await client.post(f"training_runs/{place}/publish")
        assert (await other.delete(f"training_runs/{place}")).status_code == 403
        await client.put(f"sessions/{session}/project", json={"project_id": "p"})
        await client.get("checkpoints")
        body = {"model_id": model, "seq_id": 2, "path": "../x"}
        assert (await client.post("save_weights", json=body)).status_code == 200
        await client.delete(f"training_runs/{place}")
        await client.post("unload_model", json={"model_id": model})
    found = await records(edges, "alice")
    assert told(found) == [
        ("session_create", session, "ok"),
        ("model_create", model, "accepted"),
        ("checkpoint_save", path, "accepted"),
        ("checkpoint_ttl_set", path, "ok"),
        ("checkpoint_publish", path, "ok"),
        ("project_assign", session, "ok"),
        ("checkpoint_save", f"tinker://{model}/weights/../x", "invalid_request"),
        ("checkpoint_delete", path, "ok"),
        ("model_unload", model, "accepted"),
    ]
    assert {one.address for one in found} == {"127.0.0.1"}
    assert found[3].details == {"ttl_seconds": "7200"}
    assert found[2].request_id == f"{model}:1"
    (refused,) = await records(edges, "bob")
    assert told([refused]) == [("checkpoint_delete", path, "permission_denied")]


async def test_what_is_done_over_grpc(edges: Edges) -> None:
    using = {"metadata": (("x-api-key", ALICE),), "timeout": 20}
    async with grpc.aio.insecure_channel(edges.grpc_address) as channel:
        user = service_pb2_grpc.TinsmithServiceStub(channel)
        made = await user.CreateSession(sessions_pb2.CreateSessionRequest(project_id="p"), **using)
        await user.ListModels(models_pb2.ListModelsRequest(), **using)
        with pytest.raises(grpc.aio.AioRpcError):
            asked = checkpoints_pb2.DeleteCheckpointRequest(path="nothing")
            await user.DeleteCheckpoint(asked, **using)
        path = f"tinker://{made.session_id}:train:0/external_weights/a"
        with pytest.raises(grpc.aio.AioRpcError):
            reading = checkpoints_pb2.ReadExternalWeightsRequest(path=path)
            await user.ReadExternalWeights(reading, **using).read()
    found = await records(edges, "alice")
    assert told(found) == [
        ("session_create", made.session_id, "ok"),
        ("checkpoint_delete", "nothing", "invalid_request"),
        ("checkpoint_read", path, "not_found"),
    ]
    assert found[0].details == {"project_id": "p"}
    assert (found[0].method, found[0].address) == ("CreateSession", "127.0.0.1")


async def test_key_events(edges: Edges) -> None:
    using = {"metadata": (("x-api-key", ROOT),), "timeout": 20}
    async with grpc.aio.insecure_channel(edges.grpc_address) as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        asked = admin_pb2.CreateKeyRequest(owner="carol", role=admin_pb2.KEY_ROLE_READ)
        made = await admin.CreateKey(asked, **using)
        rotated = await admin.RotateKey(admin_pb2.RotateKeyRequest(id=made.api_key.id), **using)
        await admin.RevokeKey(admin_pb2.RevokeKeyRequest(id=rotated.api_key.id), **using)
    found = await records(edges)
    assert told(found) == [
        ("key_create", made.api_key.id, "ok"),
        ("key_rotate", made.api_key.id, "ok"),
        ("key_revoke", rotated.api_key.id, "ok"),
    ]
    assert found[0].details == {"owner": "carol", "role": "KEY_ROLE_READ"}
    assert {one.owner for one in found} == {"root"}
    assert made.key not in repr(found) and rotated.key not in repr(found)


async def test_refusals_are_written_down_of_strangers_and_of_keys_that_may_not(edges: Edges) -> None:
    async with edges.http("tml-wrong-wrong-wrong") as stranger, edges.http("") as nobody:
        for _ in range(3):
            assert (await stranger.get("sessions")).status_code == 401
        assert (await nobody.post("sessions/search", json={})).status_code == 401
    async with grpc.aio.insecure_channel(edges.grpc_address) as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError):
            await admin.ListKeys(admin_pb2.ListKeysRequest(), metadata=(("x-api-key", ALICE),), timeout=20)
    found = {one.owner: one for one in await records(edges)}
    assert (found[""].event, found[""].outcome, found[""].count) == ("identity_refuse", "unauthenticated", 4)
    assert "wrong-wrong" not in repr(found[""])
    own = found["alice"]
    assert (own.outcome, own.method, own.count) == ("role_missing", "ListKeys", 1)
    assert own.key_id


async def test_what_is_refused_where_nothing_else_is_written_down(edges: Edges) -> None:
    async with edges.http() as client, edges.http(BOB) as other:
        model = await new_model(edges, client)
        path = await export(edges, client, model, 1, "e")
        links = (await client.get(f"{url(path)}/external_weights_urls")).json()["urls"]
        own = await records(edges, "alice")
        for key in (BOB, ALICE):
            async with edges.http(key) as client:
                await client.get("audit", params={"owner": "root"})
        changed = next(iter(links.values())).replace("signature=", "signature=0")
        for _ in range(2):
            assert (await other.get(changed)).status_code == 403
        unsigned = f"{edges.base_url}/api/v1/traces/{model.partition(':')[0]}"
        assert (await other.get(unsigned)).status_code == 403
    found = {one.owner: one for one in await records(edges) if one.event == "identity_refuse"}
    assert (found["bob"].outcome, found["bob"].method, found["bob"].count) == ("role_missing", "GET audit", 1)
    assert (found[""].outcome, found[""].method, found[""].count) == ("permission_denied", "GET downloads", 3)
    assert len(await records(edges, "alice")) == len(own) + 1


async def test_a_wrong_key_beside_that_of_a_call_is_in_its_record(edges: Edges) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        path = await save(edges, client, model, 1, "a")
        asked = {"path": path, "optimizer": True, "weights_access_token": "tml-wrong"}
        # Accepted, to fail; and refused.
        await client.post("load_weights", json={**asked, "model_id": model, "seq_id": 2})
        made = {**asked, "session_id": model.partition(":")[0], "model_seq_id": 7}
        assert (await client.post("load_weights", json=made)).status_code == 403
    found = await records(edges)
    assert [one.event for one in found if one.outcome == "permission_denied"] == ["model_load", "model_load"]
    assert "identity_refuse" not in repr(found)


async def wrote(edges: Edges, *acts: tuple[str, str]) -> None:
    """Keeps records of (owner, event)."""
    for owner, event in acts:
        made = AuditRecord(id=new_id(), at=time.time(), event=event, outcome="ok", owner=owner)
        await edges.app.audit_store.add([made])
        # Those of one millisecond are in the order of their streams.
        await asyncio.sleep(0.002)


ACTS = (
    ("alice", "session_create"),
    ("alice", "checkpoint_publish"),
    ("bob", "key_create"),
    ("", "identity_refuse"),
)


async def test_the_sdks_audit_log_is_the_callers_own_and_an_admins_everybodys(edges: Edges) -> None:
    await wrote(edges, *ACTS)

    async def asked(key: str, **query: Any) -> list[str]:
        async with edges.http(key) as client:
            answer = await client.get("audit", params={"event_type": "all", **query})
            assert answer.status_code == 200, answer.text
            return [one.event for one in types.AuditLogResponse.model_validate(answer.json()).entries]

    assert await asked(ALICE) == ["session_create", "checkpoint_publish"]
    assert await asked(ALICE, event_type="checkpoints") == ["checkpoint_publish"]
    assert await asked(BOB) == ["key_create"]
    assert await asked(ROOT) == [event for _, event in ACTS]
    assert await asked(ROOT, event_type="organizations") == ["key_create", "identity_refuse"]
    assert await asked(ROOT, day="2025-01-01") == []


async def test_a_day_of_too_many_records_is_read_by_pages(
    edges: Edges, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_routes, "_MOST_OF_DAY", 3)
    await wrote(edges, *ACTS)
    async with edges.http(ROOT) as client:
        refused = await client.get("audit")
        assert (refused.status_code, refused.json()["code"]) == (400, "too_many_records")
        found, cursor = [], ""
        for _ in range(3):
            page = (await client.get("audit", params={"limit": 2, "cursor": cursor})).json()
            found += [entry["event"] for entry in page["entries"]]
            cursor = page.get("next_cursor", "")
            if not cursor:
                break
        assert found == [event for _, event in ACTS]
        for wrong in ("event_type=nothing", "day=yesterday", "limit=0", "cursor=x", "since=1"):
            assert (await client.get(f"audit?{wrong}")).status_code == 400, wrong


async def test_the_audit_over_grpc_by_owner_time_and_event(edges: Edges) -> None:
    await wrote(edges, *ACTS[:2])
    between = Timestamp()
    between.FromNanoseconds(time.time_ns())
    await wrote(edges, *ACTS[2:])
    async with grpc.aio.insecure_channel(edges.grpc_address) as channel:
        user = service_pb2_grpc.TinsmithServiceStub(channel)

        async def asked(key: str, **fields: Any) -> list[str]:
            found, token = [], ""
            while True:
                request = audit_pb2.ListAuditRecordsRequest(page_size=1, page_token=token, **fields)
                page = await user.ListAuditRecords(request, metadata=(("x-api-key", key),), timeout=20)
                found += [record.event for record in page.records]
                token = page.next_page_token
                if not token:
                    return found

        events = [event for _, event in reversed(ACTS)]
        assert await asked(ROOT) == events
        assert await asked(ROOT, owner="bob") == ["key_create"]
        assert await asked(ROOT, start_time=between) == events[:2]
        assert await asked(ROOT, end_time=between, event_prefix="session_") == ["session_create"]
        assert await asked(ALICE) == await asked(ALICE, owner="alice") == events[2:]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asked(ALICE, owner="bob")
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
