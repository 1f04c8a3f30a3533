"""What one API key may have, over both edges: a refusal names the limit and its flag."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from google.protobuf.message import Message

from services.common.contract import errors
from services.common.contract.errors import Gone, StorageFull
from services.common.process import rpc
from services.common.state import keys
from services.common.state.journal_records import error_result
from services.common.state.room import RoomLimits
from services.gateway.access.limits import Limits, OwnerLimits
from services.gateway.retention.snapshot_plan import SnapshotBudget
from tests.unit.gateway.edges import ALICE, BASE, BOB, LORA, Edges, new_model, new_session, running
from tests.unit.gateway.saved import CONTENT, export, save, url
from tinsmith.v1 import (
    checkpoints_pb2,
    models_pb2,
    results_pb2,
    sampling_pb2,
    service_pb2_grpc,
    sessions_pb2,
)


@pytest.fixture
def limits(request: pytest.FixtureRequest) -> Limits:
    given = getattr(request, "param", {})
    return Limits(min_ttl_seconds=1, owners=replace(OwnerLimits(), **given))


def bounded(**limits: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("limits", [limits], indirect=True)


def refused(response: httpx.Response, flag: str) -> bool:
    assert (response.status_code, response.json()["code"]) == (429, "limit_reached"), response.text
    assert response.headers["retry-after"] == "1"
    return flag in response.json()["detail"]


@bounded(sessions=2)
async def test_sessions_are_counted_and_a_repeated_request_is_none(edges: Edges) -> None:
    body = {"tags": [], "sdk_version": "0.38.0"}
    async with edges.http() as alice, edges.http(BOB) as bob:
        once = {"x-idempotency-key": "k", "idempotency-key": "k"}
        first = await alice.post("create_session", json=body, headers=once)
        await new_session(alice)
        assert refused(await alice.post("create_session", json=body), "--max-sessions")
        again = await alice.post("create_session", json=body, headers=once)
        assert again.json()["session_id"] == first.json()["session_id"]
        await new_session(bob)
    async with rpc.channel(edges.grpc_address) as channel:
        stub = service_pb2_grpc.TinsmithServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            metadata = (("x-api-key", ALICE),)
            await stub.CreateSession(sessions_pb2.CreateSessionRequest(), timeout=10, metadata=metadata)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert dict(caught.value.trailing_metadata() or ())["tinsmith-code"] == "limit_reached"
    assert "--max-sessions" in (caught.value.details() or "")


@bounded(models=1)
async def test_models_are_counted_and_a_repeated_request_is_none(edges: Edges) -> None:
    async with edges.http() as alice:
        session = await new_session(alice)
        body: dict[str, Any] = {"session_id": session, "base_model": BASE, "lora_config": {"rank": 4}}
        for _ in range(2):
            assert (await alice.post("create_model", json={**body, "model_seq_id": 0})).status_code == 200
        assert refused(await alice.post("create_model", json={**body, "model_seq_id": 1}), "--max-models")


@bounded(samplers=1)
async def test_sampling_clients_of_a_session_are_counted(edges: Edges) -> None:
    async with edges.http() as alice:
        model = await new_model(edges, alice)
        session = model.partition(":")[0]
        body = {"session_id": session, "base_model": BASE}
        for _ in range(2):
            made = await alice.post("create_sampling_session", json={**body, "sampling_session_seq_id": 0})
            assert made.status_code == 200
        more = await alice.post("create_sampling_session", json={**body, "sampling_session_seq_id": 1})
        assert refused(more, "--max-samplers")
        unnamed = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 1}
        assert refused(await alice.post("save_weights_for_sampler", json=unnamed), "--max-samplers")
        other = await new_session(alice)
        body = {"session_id": other, "base_model": BASE, "sampling_session_seq_id": 0}
        assert (await alice.post("create_sampling_session", json=body)).status_code == 200


async def save_unnamed(client: httpx.AsyncClient, model: str, seq_id: int) -> httpx.Response:
    body = {"model_id": model, "seq_id": seq_id, "sampling_session_seq_id": seq_id}
    return await client.post("save_weights_for_sampler", json=body)


async def test_unnamed_snapshots_are_counted_by_their_bytes(redis_url: str, tmp_path: Path) -> None:
    budget = SnapshotBudget(6400, 3840)
    async with (
        running(redis_url, tmp_path, snapshots=budget) as edges,
        edges.http() as alice,
        edges.http(BOB) as bob,
    ):
        model, others = await new_model(edges, alice), await new_model(edges, bob)
        for seq_id in (1, 2):
            assert (await save_unnamed(alice, model, seq_id)).status_code == 200
            saved = checkpoints_pb2.SaveForSamplerResult(path="x", version=seq_id, size_bytes=1600)
            await edges.answer(model, seq_id, save_for_sampler=saved)
        assert refused(await save_unnamed(alice, model, 3), "--snapshot-owner-bytes")
        assert (await save_unnamed(alice, model, 2)).status_code == 200
        assert (await save_unnamed(bob, others, 1)).status_code == 200
        # Those that are accepted and not made count, too, each for a 64th of 3840 while none is made: with
        # hers they are more than 6400, and his are more than half of that.
        accepted = [(await save_unnamed(bob, others, seq_id)).status_code for seq_id in range(1, 61)]
        assert accepted == [200] * 53 + [429] * 7
        named = {"model_id": model, "seq_id": 3, "path": "kept"}
        assert (await alice.post("save_weights_for_sampler", json=named)).status_code == 200


async def test_a_save_that_comes_to_nothing_gives_its_part_back(redis_url: str, tmp_path: Path) -> None:
    full = errors.to_pb(StorageFull("the disk is full"))
    async with (
        running(redis_url, tmp_path, snapshots=SnapshotBudget(640, 640)) as edges,
        edges.http() as alice,
    ):
        model = await new_model(edges, alice)
        # Each that is to come counts for a 64th of what she may have.
        for seq_id in range(1, 80):
            assert (await save_unnamed(alice, model, seq_id)).status_code == 200, seq_id
            await edges.answer(model, seq_id, error=full)
        # Sent again it is answered as before, and takes nothing.
        assert (await save_unnamed(alice, model, 79)).status_code == 200
        assert await edges.redis.zcard(keys.coming_snapshots("alice")) == 0


async def test_a_save_that_is_not_taken_on_has_no_part(redis_url: str, tmp_path: Path) -> None:
    async with (
        running(redis_url, tmp_path, snapshots=SnapshotBudget(640, 640)) as edges,
        edges.http() as alice,
    ):
        model = await new_model(edges, alice)
        coming = keys.coming_snapshots("alice")
        edges.journal.room.limits = RoomLimits(owner_operations=1)
        assert (await save_unnamed(alice, model, 1)).status_code == 200
        for _ in range(2):
            # The first waits, and no more may.
            assert refused(await save_unnamed(alice, model, 3), "--owner-operations")
        assert [name.decode() for name in await edges.redis.zrange(coming, 0, -1)] == [f"{model}@1"]
        # Sent again, what was taken on keeps its part.
        assert (await save_unnamed(alice, model, 1)).status_code == 200
        assert await edges.redis.zcard(coming) == 1

        await edges.answer(model, 1, error=errors.to_pb(StorageFull("the disk is full")))
        await edges.redis.hset(keys.journal_meta(model), "closed", error_result(errors.to_pb(Gone("over"))))
        assert (await save_unnamed(alice, model, 2)).status_code == 200
        assert await edges.redis.zcard(coming) == 0, "it fails at once"


@bounded(checkpoints=2)
async def test_checkpoints_are_counted_until_they_are_deleted(edges: Edges) -> None:
    async with edges.http() as alice:
        model = await new_model(edges, alice)
        first = await save(edges, alice, model, 1, "a")
        await export(edges, alice, model, 2, "b")
        for verb, fields in (
            ("save_weights", {"path": "c"}),
            ("save_weights_for_sampler", {"path": "c"}),
            ("save_weights_external", {"path": "c"}),
        ):
            body = {"model_id": model, "seq_id": 3, **fields}
            assert refused(await alice.post(verb, json=body), "--max-checkpoints")
        assert (await alice.delete(url(first))).status_code == 200
        await save(edges, alice, model, 3, "c")


def test_a_key_leaves_half_of_a_volume_to_others_unless_it_is_given_another_number() -> None:
    assert OwnerLimits().on_volume(1000).checkpoint_bytes == 500
    assert OwnerLimits(checkpoint_bytes=700).on_volume(1000).checkpoint_bytes == 700


@bounded(checkpoint_bytes=2 * len(CONTENT))
async def test_bytes_of_checkpoints_are_counted_as_they_come_and_go(edges: Edges) -> None:
    async with edges.http() as alice:
        model = await new_model(edges, alice)
        paths = [await save(edges, alice, model, seq_id, f"n{seq_id}") for seq_id in (1, 2)]
        body = {"model_id": model, "seq_id": 3, "path": "n3"}
        assert refused(await alice.post("save_weights", json=body), "--max-checkpoint-bytes")
        have = await edges.records.totals("alice")
        assert have == (2, 2 * len(CONTENT))
        # The same name anew is another version, and the one before is gone.
        assert (await alice.delete(url(paths[1]))).status_code == 200
        await save(edges, alice, model, 3, "n1", overwrite=True)
        assert await edges.records.totals("alice") == (1, len(CONTENT))
        assert (await alice.put(f"{url(paths[0])}/ttl", json={"ttl_seconds": 1})).status_code == 200
        await asyncio.sleep(1.1)
        assert (await alice.get("checkpoints")).json()["checkpoints"] == []
        assert await edges.records.totals("alice") == (0, 0)


@bounded(calls=4)
async def test_calls_under_way_are_bounded_by_key(edges: Edges) -> None:
    async with edges.http() as alice, edges.http(BOB) as bob:
        session = await new_session(alice)
        model = await new_model(edges, alice, session)
        step = {"model_id": model, "seq_id": 1, "adam_params": {}}
        waits = {"request_id": (await alice.post("optim_step", json=step)).json()["request_id"]}
        polls = [asyncio.create_task(alice.post("retrieve_future", json=waits)) for _ in range(2)]
        async with asyncio.timeout(60):
            while edges.app.gate.calls < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert refused(await alice.post("session_heartbeat", json={"session_id": session}), "--max-calls")
        await new_session(bob)
        # A poll whose client went away is none any more.
        for poll in polls:
            poll.cancel()
        async with asyncio.timeout(60):
            while edges.app.gate.calls:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        beat = await alice.post("session_heartbeat", json={"session_id": session})
        assert beat.status_code == 200


@bounded(requests_per_second=1, burst_seconds=5)
async def test_a_key_that_sends_too_fast_is_slowed_down_and_others_are_not(edges: Edges) -> None:
    async with edges.http() as alice, edges.http(BOB) as bob:
        answers = await asyncio.gather(*(alice.get("sessions") for _ in range(60)))
        let_in = [answer for answer in answers if answer.status_code == 200]
        assert len(let_in) >= 5
        slowed = [answer for answer in answers if answer.status_code != 200]
        assert slowed
        assert all(refused(answer, "--requests-per-second") for answer in slowed)
        assert (await bob.get("sessions")).status_code == 200


@bounded(downloads=2)
async def test_downloads_under_way_are_bounded_and_end_with_their_readers(edges: Edges) -> None:
    async with edges.http() as alice, httpx.AsyncClient(timeout=20) as anyone:
        model = await new_model(edges, alice)
        path = await export(edges, alice, model, 1, "e")
        signed = (await alice.get(f"{url(path)}/external_weights_urls")).json()["urls"]
        (file,) = signed.values()
        gate = edges.app.gate
        with gate.download("alice"):
            assert refused(await anyone.get(file), "--max-downloads")
        for _ in range(3):
            async with anyone.stream("GET", file) as response:
                assert response.status_code == 200
        for _ in range(600):
            if (await anyone.get(file)).status_code == 200:
                break
            await asyncio.sleep(0.05)
        for _ in range(3):
            assert (await anyone.get(file)).content == CONTENT


async def refused_over_grpc(edges: Edges, method: str, request: Message, flag: str) -> bool:
    """Whether a call is refused for a limit, and the refusal names its flag."""
    async with rpc.channel(edges.grpc_address) as channel:
        stub = service_pb2_grpc.TinsmithServiceStub(channel)
        try:
            await getattr(stub, method)(request, timeout=10, metadata=(("x-api-key", ALICE),))
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, error.details()
            assert dict(error.trailing_metadata() or ())["tinsmith-code"] == "limit_reached"
            return flag in (error.details() or "")
    return False


@bounded(models=1, samplers=1, checkpoints=1)
async def test_over_grpc_the_same_is_refused(edges: Edges) -> None:
    async with edges.http() as alice:
        model = await new_model(edges, alice)
        session = model.partition(":")[0]
        await save(edges, alice, model, 1, "a")
    made = models_pb2.CreateModelRequest(session_id=session, model_seq_id=1, base_model=BASE, lora=LORA)
    assert await refused_over_grpc(edges, "CreateModel", made, "--max-models")
    opened = sampling_pb2.CreateSamplingSessionRequest(session_id=session, base_model=BASE)
    assert not await refused_over_grpc(edges, "CreateSamplingSession", opened, "")
    opened.sampling_session_seq_id = 1
    assert await refused_over_grpc(edges, "CreateSamplingSession", opened, "--max-samplers")
    saved = checkpoints_pb2.SaveStateRequest(model_id=model, seq_id=2, name="b")
    assert await refused_over_grpc(edges, "SaveState", saved, "--max-checkpoints")


@bounded(requests_per_second=1, burst_seconds=5)
async def test_over_grpc_a_key_that_sends_too_fast_is_slowed_down(edges: Edges) -> None:
    asked = sessions_pb2.ListSessionsRequest()
    calls = [refused_over_grpc(edges, "ListSessions", asked, "--requests-per-second") for _ in range(40)]
    slowed = await asyncio.gather(*calls)
    assert slowed.count(False) >= 5
    assert any(slowed)


@bounded(calls=4)
async def test_over_grpc_calls_under_way_are_bounded_and_end_with_their_clients(edges: Edges) -> None:
    async with edges.http() as alice, edges.http(BOB) as bob:
        model = await new_model(edges, alice)
        step = {"model_id": model, "seq_id": 1, "adam_params": {}}
        request_id = (await alice.post("optim_step", json=step)).json()["request_id"]
        async with rpc.channel(edges.grpc_address) as channel:
            stub = service_pb2_grpc.TinsmithServiceStub(channel)
            waits = results_pb2.GetResultRequest(request_id=request_id, timeout_seconds=20)
            polls = [stub.GetResult(waits, metadata=(("x-api-key", ALICE),), timeout=30) for _ in range(2)]
            async with asyncio.timeout(60):
                while edges.app.gate.calls < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            asked = sessions_pb2.ListSessionsRequest()
            assert await refused_over_grpc(edges, "ListSessions", asked, "--max-calls")
            await new_session(bob)
            for poll in polls:
                poll.cancel()
            async with asyncio.timeout(60):
                while edges.app.gate.calls:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert not await refused_over_grpc(edges, "ListSessions", asked, "")
