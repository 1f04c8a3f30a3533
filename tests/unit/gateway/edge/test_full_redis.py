"""While Redis has no memory left, clients get rid of what they have, and are given nothing more."""

from __future__ import annotations

import grpc.aio
import pytest

from services.common.contract import ids
from services.common.process import rpc
from services.common.state import known_models
from services.common.state.registry import Registry
from services.gateway.administration.base_models import retire
from tests.unit.gateway.edges import ALICE, BASE, Edges, new_model, new_session
from tests.unit.gateway.full_redis import full
from tests.unit.gateway.saved import names, save, url
from tinsmith.v1 import service_pb2_grpc, sessions_pb2


async def test_checkpoints_models_samples_and_sessions_go(edges: Edges) -> None:
    async with edges.http() as client:
        first, second = await new_model(edges, client), await new_model(edges, client)
        path, kept = await save(edges, client, first, 1, "a"), await save(edges, client, first, 2, "b")
        opened = {"session_id": ids.session_of(first), "sampling_session_seq_id": 0, "base_model": BASE}
        sampler = (await client.post("create_sampling_session", json=opened)).json()["sampling_session_id"]
        sample = {
            "sampling_session_id": sampler,
            "seq_id": 0,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
            "num_samples": 1,
            "sampling_params": {"max_tokens": 4},
        }
        assert (await client.post("asample", json=sample)).status_code == 200
        edges.journal.room.note_memory(1 << 30, 1 << 30)
        async with full(edges.redis):
            assert (await client.delete(url(path))).status_code == 200
            assert await names(client) == ["weights/b"]
            assert edges.files.storage.versions(first, "weights/a") == []
            ttl = await client.put(f"{url(kept)}/ttl", json={"ttl_seconds": 100_000})
            assert ttl.status_code == 200

            cancelled = await client.post("cancel_future", json={"request_id": f"{sampler}:0"})
            assert cancelled.status_code == 200

            unloads = [await client.post("unload_model", json={"model_id": first}) for _ in range(2)]
            assert [answer.json()["request_id"] for answer in unloads] == [f"{first}:3"] * 2
            operation = await edges.operation(first, 3)
            assert operation is not None and operation.HasField("unload_model")

            session = {"session_id": ids.session_of(second)}
            assert (await client.post("session_heartbeat", json=session)).status_code == 200
            finish = {"reason": {"type": "success"}, "detail": None}
            over = await client.post(f"sessions/{session['session_id']}/finish", json=finish)
            assert over.status_code == 200
            assert (await client.post("session_heartbeat", json=session)).status_code == 410


async def test_nothing_more_is_taken_on(edges: Edges) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        session = await new_session(client)
        opened = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
        create = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 4}}
        asked = {
            "create_session": {"tags": [], "sdk_version": "1"},
            "create_model": create,
            "create_sampling_session": opened,
            "optim_step": {"model_id": model, "seq_id": 1, "adam_params": {}},
            "save_weights": {"model_id": model, "seq_id": 1, "path": "a"},
            "save_weights_for_sampler": {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 1},
        }
        async with full(edges.redis):
            answers = {name: await client.post(name, json=body) for name, body in asked.items()}
        assert {name: answer.status_code for name, answer in answers.items()} == dict.fromkeys(asked, 429)
        assert await edges.operation(model, 1) is None


async def test_a_base_model_is_retired_and_a_replica_drained(edges: Edges) -> None:
    for announcer in edges.announcers.values():
        await announcer.stop()
    registry = Registry(edges.redis)
    async with full(edges.redis):
        await registry.drain("sampler", "sampler-0")
        await retire(edges.redis, BASE)
    view = await registry.look()
    assert view.drained == {("sampler", "sampler-0")}
    assert view.base_models[BASE] == known_models.KnownModel(BASE, retired=True)


async def test_refusals_for_want_of_memory_do_not_fill_the_log(
    edges: Edges, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"tags": [], "sdk_version": "1"}
    async with (
        edges.http() as client,
        rpc.channel(edges.grpc_address) as channel,
        full(edges.redis),
    ):
        stub = service_pb2_grpc.TinsmithServiceStub(channel)
        for _ in range(10):
            assert (await client.post("create_session", json=body)).status_code == 429
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.CreateSession(
                    sessions_pb2.CreateSessionRequest(), metadata=(("x-api-key", ALICE),), timeout=10
                )
    # Of each edge the first, unless another test of this process had it.
    assert len([one for one in caplog.messages if "not allowed when used memory" in one]) <= 2
