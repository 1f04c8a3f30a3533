"""Base models whose trainer or sampler is away: restarting, loading for the first time, or gone for good."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import httpx
import msgspec
import pytest
import tinker

from services.common.contract import ids
from services.common.state import keys, known_models
from services.common.state.known_models import Configured
from services.common.state.registry import Announcer, ServiceRecord
from tests.unit.gateway.edge.http.test_sampling import base_session, body
from tests.unit.gateway.edges import ALICE, BASE, Edges, new_model, new_session
from tests.unit.gateway.saved import failure, save, save_sampler
from tinsmith.v1 import models_pb2, service_pb2_grpc, training_pb2

NEW = "org/new"


@pytest.fixture
async def away(edges: Edges) -> Edges:
    """The edges of a base model whose trainer and sampler have just gone."""
    for announcer in edges.announcers.values():
        await announcer.stop()
    return edges


async def create(client: httpx.AsyncClient, base_model: str = BASE, **changes: Any) -> httpx.Response:
    made = {
        "session_id": await new_session(client),
        "model_seq_id": 0,
        "base_model": base_model,
        "lora_config": {"rank": 4},
        **changes,
    }
    return await client.post("create_model", json=made)


def model_of(created: httpx.Response) -> str:
    return ids.parse_request_id(created.json()["request_id"])[0]


async def opened(client: httpx.AsyncClient, **source: str) -> httpx.Response:
    """A sampling session on a base model or a path."""
    made = {"session_id": await new_session(client), "sampling_session_seq_id": 0, **source}
    return await client.post("create_sampling_session", json=made)


async def served(client: httpx.AsyncClient) -> dict[str, dict[str, Any]]:
    answer = (await client.get("get_server_capabilities")).json()
    return {model["model_name"]: model for model in answer["supported_models"]}


async def announced(edges: Edges, kind: str, name: str, **limits: int) -> None:
    """Has been alive for a moment."""
    fields: Any = {"vocab_size": 100, "context_length": 64, **limits}
    announcer = Announcer(
        edges.redis,
        ServiceRecord(kind=kind, id=f"{kind}-of-{name}", address="h:1", base_model=name, **fields),
    )
    await announcer.start()
    await announcer.stop()


async def test_a_model_is_created_while_its_trainer_is_away(away: Edges) -> None:
    async with away.http() as client:
        created = await create(client)
        assert created.status_code == 200, created.text
        assert await away.operation(model_of(created), 0) is not None


async def test_a_base_model_is_listed_while_its_services_are_away(away: Edges) -> None:
    async with away.http() as client:
        model = (await served(client))[BASE]
    assert (model["trainable"], model["sampleable"], model["max_context_length"]) == (True, True, 64)


async def test_samples_are_accepted_while_the_sampler_is_away(away: Edges) -> None:
    async with away.http() as client:
        session = await base_session(client)
        response = await client.post("asample", json=body(session))
        assert response.status_code == 200, response.text
        refused = await client.post("asample", json=body(session, seq_id=1, num_samples=4096))
        assert refused.status_code == 400, "what the sampler said of itself is remembered"


async def test_a_saved_path_is_sampled_and_continued_from_while_everything_is_away(edges: Edges) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        await save_sampler(edges, client, model, 1, "named")
        path = await save(edges, client, model, 2, "state")
        for announcer in edges.announcers.values():
            await announcer.stop()
        await edges.discovery.refresh()
        assert (await opened(client, model_path=f"tinker://{model}/sampler_weights/named")).status_code == 200
        loaded = {
            "session_id": await new_session(client),
            "model_seq_id": 0,
            "path": path,
            "optimizer": False,
        }
        assert (await client.post("load_weights", json=loaded)).status_code == 200
        into = {"model_id": model, "seq_id": 3, "path": path, "optimizer": True}
        assert (await client.post("load_weights", json=into)).status_code == 200
        assert (await edges.operation(model, 3)) is not None


async def test_limits_of_a_trainer_that_is_away_hold(edges: Edges) -> None:
    await announced(edges, "trainer", NEW, max_lora_rank=8)
    async with edges.http() as client:
        refused = await create(client, NEW, lora_config={"rank": 16})
        assert refused.status_code == 400
        assert "16" in refused.json()["detail"]
        assert (await create(client, NEW, lora_config={"rank": 8})).status_code == 200


async def test_what_no_sampler_can_run_is_refused_at_the_save_and_trained_all_the_same(
    edges: Edges,
) -> None:
    def refused(told: dict[str, Any]) -> bool:
        return told["category"] == "user" and "runs adapters" in told["error"]

    async with edges.http() as client:
        adapter, full = await new_model(edges, client), await new_model(edges, client, rank=0)
        sampler = edges.announcers["sampler"]
        await sampler.update(msgspec.structs.replace(sampler.record, adapts=False))
        await edges.discovery.refresh()
        step = {"model_id": adapter, "seq_id": 1, "adam_params": {}}
        assert (await client.post("optim_step", json=step)).status_code == 200
        for seq_id, name in ((2, {"path": "best"}), (3, {"sampling_session_seq_id": 0})):
            for model in (adapter, full):
                save = {"model_id": model, "seq_id": seq_id, **name}
                response = await client.post("save_weights_for_sampler", json=save)
                assert response.status_code == 200, response.text
        assert [refused(await failure(client, adapter, seq_id)) for seq_id in (2, 3)] == [True, True]
        assert await edges.operation(full, 2) is not None
        state = {"model_id": adapter, "seq_id": 4, "path": "kept"}
        assert (await client.post("save_weights", json=state)).status_code == 200
        assert (await edges.operation(adapter, 4)) is not None
        # Also while it is away.
        await sampler.stop()
        save = {"model_id": adapter, "seq_id": 5, "path": "later"}
        assert (await client.post("save_weights_for_sampler", json=save)).status_code == 200
        assert refused(await failure(client, adapter, 5))
    async with grpc.aio.insecure_channel(edges.grpc_address) as channel:
        stub = service_pb2_grpc.TinsmithServiceStub(channel)
        models = await stub.ListModels(models_pb2.ListModelsRequest(), metadata=(("x-api-key", ALICE),))
    (listed,) = models.models
    assert listed.sampleable and not listed.samples_adapters


async def test_what_samplers_of_quantised_weights_cannot_run_is_refused_at_the_save(edges: Edges) -> None:
    async with edges.http() as client:
        adapter, full = await new_model(edges, client), await new_model(edges, client, rank=0)
        sampler = edges.announcers["sampler"]
        await sampler.update(msgspec.structs.replace(sampler.record, full_models=False))
        await edges.discovery.refresh()
        for model in (adapter, full):
            save = {"model_id": model, "seq_id": 1, "path": "best"}
            assert (await client.post("save_weights_for_sampler", json=save)).status_code == 200
        told = await failure(client, full, 1)
        assert told["category"] == "user" and "the weights of each are quantised" in told["error"]
        assert await edges.operation(adapter, 1) is not None
        # Also while it is away.
        await sampler.stop()
        save = {"model_id": full, "seq_id": 2, "path": "later"}
        assert (await client.post("save_weights_for_sampler", json=save)).status_code == 200
        assert "quantised" in (await failure(client, full, 2))["error"]


async def test_what_one_gateway_never_saw_another_one_left_in_redis(away: Edges) -> None:
    # The first look of this gateway comes after everything is gone.
    await away.discovery.refresh()
    async with away.http() as client:
        assert (await create(client)).status_code == 200


async def test_a_configured_model_is_created_before_its_trainer_was_ever_there(edges: Edges) -> None:
    await known_models.configure(edges.redis, [Configured(name=NEW)])
    async with edges.http() as client:
        created = await create(client, NEW)
        assert created.status_code == 200, created.text
        model = model_of(created)
        assert (await served(client))[NEW] == {
            "model_name": NEW,
            "max_context_length": None,
            "trainable": True,
            "sampleable": True,
            "weights": None,
        }
        assert (await opened(client, base_model=NEW)).status_code == 200
        # The trainer comes up, and what the client asks next is answered.
        await announced(edges, "trainer", NEW)
        await edges.discovery.refresh()
        lora = models_pb2.CreateModelResult()
        await edges.answer(model, 0, create_model=lora)
        assert (await client.post("get_info", json={"model_id": model})).status_code == 200


async def test_a_sample_waits_for_the_first_sampler_as_long_as_the_sdk_repeats(edges: Edges) -> None:
    await known_models.configure(edges.redis, [Configured(name=NEW)])
    async with edges.http() as client:
        session = (await opened(client, base_model=NEW)).json()["sampling_session_id"]
        early = await client.post("asample", json=body(session))
        # The SDK repeats a sample after 429 without end, after 5xx for five minutes.
        assert early.status_code == 429
        assert "sampler for org/new is starting" in early.json()["detail"]
        await announced(edges, "sampler", NEW)
        await edges.discovery.refresh()
        assert (await client.post("asample", json=body(session))).status_code == 200


async def test_a_batch_waits_for_the_first_trainer_and_uses_up_nothing(edges: Edges) -> None:
    await known_models.configure(edges.redis, [Configured(name=NEW)])
    channel = grpc.aio.insecure_channel(edges.grpc_address)
    stub = service_pb2_grpc.TinsmithServiceStub(channel)
    async with edges.http() as client:
        model = model_of(await create(client, NEW))
    request = training_pb2.ForwardBackwardRequest(model_id=model, seq_id=1)
    request.forward_backward.loss_fn = "cross_entropy"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.ForwardBackward(request, metadata=(("x-api-key", ALICE),))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert dict(caught.value.trailing_metadata() or ())["tinsmith-code"] == "starting"
    assert await edges.operation(model, 1) is None
    await channel.close()


async def test_what_the_operator_does_not_train_or_sample_is_refused(edges: Edges) -> None:
    only_trained = Configured(name="org/trained", sampled=False)
    only_sampled = Configured(name="org/sampled", trained=False)
    await known_models.configure(edges.redis, [only_trained, only_sampled])
    async with edges.http() as client:
        refused = await opened(client, base_model="org/trained")
        assert (refused.status_code, refused.json()["code"]) == (400, "not_sampleable")
        assert BASE in refused.json()["detail"]
        refused = await create(client, "org/sampled")
        assert (refused.status_code, refused.json()["code"]) == (400, "not_trainable")
        # One that is there all the same is used while it lives.
        fields: Any = {"base_model": "org/trained", "vocab_size": 100, "context_length": 64}
        extra = Announcer(edges.redis, ServiceRecord(kind="sampler", id="extra", address="h:1", **fields))
        await extra.start()
        await edges.discovery.refresh()
        assert (await opened(client, base_model="org/trained")).status_code == 200
        await extra.stop()


async def test_an_unknown_name_is_400_with_the_names_that_are_known(away: Edges) -> None:
    async with away.http() as client:
        for refused in (await create(client, "org/unknown"), await opened(client, base_model="org/unknown")):
            assert (refused.status_code, refused.json()["code"]) == (400, "unknown_base_model")
            assert BASE in refused.json()["detail"]


async def test_before_anything_is_known_a_client_is_told_to_wait(edges: Edges) -> None:
    for announcer in edges.announcers.values():
        await announcer.stop()
    await edges.redis.flushall()
    async with edges.http() as client:
        early = await create(client)
        assert early.status_code == 429
        # The SDK repeats this ten times: with these pauses for as long as a model loads.
        assert int(early.headers["retry-after"]) >= 30


async def test_a_retired_base_model_is_refused_and_not_listed_until_it_is_back(edges: Edges) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        for announcer in edges.announcers.values():
            await announcer.stop()
        await known_models.retire(edges.redis, BASE)
        await known_models.configure(edges.redis, [Configured(name=NEW)])
        await edges.discovery.refresh()
        assert set(await served(client)) == {NEW}
        refused = await create(client)
        assert (refused.status_code, refused.json()["code"]) == (400, "base_model_retired")
        assert NEW in refused.json()["detail"]
        info = await client.post("get_info", json={"model_id": model})
        assert (info.status_code, info.json()["code"]) == (400, "base_model_retired")
        await announced(edges, "trainer", BASE)
        await edges.discovery.refresh()
        assert (await create(client)).status_code == 200


async def test_records_of_another_version_are_passed_over(edges: Edges) -> None:
    await edges.redis.hset(keys.BASE_MODELS, f"trainer:{NEW}", b'{"vocab_size": "many"}')
    await edges.redis.hset(keys.services("trainer"), "trainer-9", b'{"kind": 1}')
    await edges.redis.zadd(keys.services_seen("trainer"), {"trainer-9": 1e15})
    async with edges.http() as client:
        assert set(await served(client)) == {BASE}


async def test_the_sdk_starts_while_everything_is_away(away: Edges) -> None:
    def start() -> str:
        with tinker.ServiceClient(base_url=away.base_url, api_key=ALICE) as service:
            service.create_sampling_client(base_model=BASE).result()
            return "started"

    assert await asyncio.to_thread(start) == "started"
