"""A request that is sent again is the same request, whatever has become of what it names."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import httpx
import pytest

from services.common.contract import ids
from services.common.state import keys
from services.common.state.journal import Journal
from services.common.storage.directory import publish_directory
from services.gateway.cluster.redis_restart import RedoLog
from services.gateway.training.request_digest import digest
from tests.unit.gateway import saved
from tests.unit.gateway.edges import BASE, Edges, new_model, new_session
from tinsmith.internal.v1 import operation_pb2
from tinsmith.v1 import checkpoints_pb2, models_pb2

Write = Callable[[], Awaitable[object]]


async def send(client: httpx.AsyncClient, route: str, **body: object) -> str:
    """The request id of an accepted request."""
    response = await client.post(route, json=body)
    assert response.status_code == 200, response.text
    return response.json()["request_id"]


async def test_a_load_is_the_same_after_its_checkpoint_was_overwritten_or_deleted(edges: Edges) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        path = await saved.save(edges, client, model, 1, "a")
        load = {"model_id": model, "seq_id": 2, "path": path, "optimizer": True}
        first = await send(client, "load_weights", **load)
        await saved.save(edges, client, model, 3, "a", overwrite=True)
        assert await send(client, "load_weights", **load) == first
        assert (await client.delete(saved.url(path))).status_code == 200
        assert await send(client, "load_weights", **load) == first
        operation = await edges.operation(model, 2)
        assert operation is not None and operation.load_state.version == 1
        other = await client.post("load_weights", json={**load, "optimizer": False})
        assert other.status_code == 409


async def test_a_model_from_a_state_is_the_same_after_the_state_is_gone(edges: Edges) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        path = await saved.save(edges, client, model, 1, "a")
        body = {"session_id": ids.session_of(model), "model_seq_id": 1, "path": path, "optimizer": True}
        first = await send(client, "load_weights", **body)
        await saved.save(edges, client, model, 2, "a", overwrite=True)
        assert await send(client, "load_weights", **body) == first
        assert (await client.delete(saved.url(path))).status_code == 200
        assert await send(client, "load_weights", **body) == first
        another = await client.post("load_weights", json={**body, "model_seq_id": 2})
        assert another.status_code == 404


async def test_a_creation_is_the_same_while_its_base_model_is_away(
    edges: Edges, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(name: str) -> None:
        raise AssertionError("looked at")

    async with edges.http() as client:
        body = {
            "session_id": await new_session(client),
            "model_seq_id": 0,
            "base_model": BASE,
            "lora_config": {"rank": 4},
        }
        first = await send(client, "create_model", **body)
        monkeypatch.setattr(edges.app.models._base_models, "trainable", away)
        assert await send(client, "create_model", **body) == first


async def test_a_refused_save_stays_refused_when_its_name_is_free_again(edges: Edges) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        path = await saved.save(edges, client, model, 1, "a")
        again = {"model_id": model, "seq_id": 2, "path": "a"}
        first = await send(client, "save_weights", **again)
        assert (await client.delete(saved.url(path))).status_code == 200
        assert await send(client, "save_weights", **again) == first
        assert "exists" in (await saved.failure(client, model, 2))["error"]


async def test_unloading_again_is_the_same_unload(edges: Edges) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        found = await asyncio.gather(*(send(client, "unload_model", model_id=model) for _ in range(5)))
        assert set(found) == {f"{model}:1"}
        await edges.answer(model, 1, unload_model=models_pb2.UnloadModelResult())
        assert await send(client, "unload_model", model_id=model) == f"{model}:1"
        assert await saved.failure(client, model, 1) == {"model_id": model}
        assert await edges.operation(model, 2) is None


async def test_an_unload_whose_place_was_taken_by_another_request_takes_the_next(edges: Edges) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        # A gateway noted the place and died before it used it.
        assert await edges.app.exports._store.claim_unload(model, 0, 1) == 1
        step = await client.post("optim_step", json={"model_id": model, "seq_id": 1, "adam_params": {}})
        assert step.status_code == 200
        assert await send(client, "unload_model", model_id=model) == f"{model}:2"
        assert await send(client, "unload_model", model_id=model) == f"{model}:2"


async def test_a_model_that_was_never_free_when_asked_can_still_be_unloaded(edges: Edges) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        for seq_id in range(1, 13):
            await send(client, "optim_step", model_id=model, seq_id=seq_id, adam_params={})
            await edges.app.exports._store.claim_unload(model, seq_id - 1, seq_id)
        assert await send(client, "unload_model", model_id=model) == f"{model}:13"


async def test_a_save_whose_sampling_session_was_taken_meanwhile_fails(edges: Edges) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        session = ids.session_of(model)
        save = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0, "kind": "inflight"}
        await send(client, "save_weights_for_sampler", **save)
        taken = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
        assert (await client.post("create_sampling_session", json=taken)).status_code == 200
        name = ids.sampling_session_id(session, 0)
        result = checkpoints_pb2.SaveForSamplerResult(sampling_session_id=name, version=1)
        await edges.answer(model, 1, save_for_sampler=result)
        told = await saved.failure(client, model, 1)
        sampler = (await client.get(f"samplers/{name}")).json()
        stores = edges.app.saves._sampling_sessions
        assert await stores.of_model(model, None) == []
    assert told["category"] == "user"
    assert "next sampling_session_seq_id" in told["error"]
    assert sampler == {"sampler_id": name, "base_model": BASE}


async def test_of_two_saves_for_one_sampling_session_the_second_fails_and_changes_nothing(
    edges: Edges,
) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        name = ids.sampling_session_id(ids.session_of(model), 0)
        for seq_id in (1, 2):
            save = {"model_id": model, "seq_id": seq_id, "sampling_session_seq_id": 0}
            await send(client, "save_weights_for_sampler", **save)
        for seq_id in (1, 2):
            result = checkpoints_pb2.SaveForSamplerResult(sampling_session_id=name, version=seq_id)
            await edges.answer(model, seq_id, save_for_sampler=result)
        assert await saved.failure(client, model, 1) == {"sampling_session_id": name}
        assert (await saved.failure(client, model, 2))["category"] == "user"
        assert await edges.app.saves._sampling_sessions.of_model(model, None) == [(name, 1)]


def test_a_digest_tells_requests_apart_by_all_that_was_chosen() -> None:
    assert digest("save", "a", {"x": "1", "y": "2"}) == digest("save", "a", {"y": "2", "x": "1"})
    different = [
        digest("save", "a"),
        digest("save", "b"),
        digest("load", "a"),
        digest("save", "a", None),
        digest("save", ["a"]),
        digest("save", 1.0),
        digest("save", float("nan")),
    ]
    assert len(set(different)) == len(different)


async def test_the_journal_knows_which_request_it_accepted(edges: Edges) -> None:
    journal = Journal(edges.redis)
    operation = operation_pb2.Operation(model_id="s:train:0", seq_id=0)
    operation.create_model.base_model = BASE
    assert not await journal.is_accepted("s:train:0", 0, b"one")
    await journal.accept(operation, "ann", digest=b"one")
    assert await journal.is_accepted("s:train:0", 0, b"one")
    assert not await journal.is_accepted("s:train:0", 0, b"two")


async def test_of_two_saves_of_one_name_under_way_together_the_second_fails(edges: Edges) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        for seq_id in (1, 2):
            await send(client, "save_weights_for_sampler", model_id=model, seq_id=seq_id, path="best")
            publish_directory(edges.data.snapshot(model, seq_id), saved.files(), replace=False)
        path = ids.tinker_path(model, "sampler_weights/best")
        for seq_id in (1, 2):
            result = checkpoints_pb2.SaveForSamplerResult(path=path, version=seq_id, size_bytes=10)
            await edges.answer(model, seq_id, save_for_sampler=result)
        assert (await saved.failure(client, model, 1))["path"] == path
        told = await saved.failure(client, model, 2)
        record = await edges.records.get(model, "sampler_weights/best")
        await edges.sweep.sweep()
    assert told["category"] == "user"
    assert "exists; choose another name" in told["error"]
    assert record is not None and record.version == 1
    assert edges.data.snapshot(model, 1).is_dir()
    assert not edges.data.snapshot(model, 2).exists(), "nobody will ask for it"


async def test_of_two_saves_of_one_name_the_one_recorded_last_fails_also_when_it_was_the_first(
    edges: Edges,
) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        for seq_id in (1, 2):
            await send(client, "save_weights_for_sampler", model_id=model, seq_id=seq_id, path="best")
        for seq_id in (2, 1):
            result = checkpoints_pb2.SaveForSamplerResult(path="x", version=seq_id, size_bytes=10)
            await edges.answer(model, seq_id, save_for_sampler=result)
        assert (await saved.failure(client, model, 1))["category"] == "user"
        record = await edges.records.get(model, "sampler_weights/best")
    assert record is not None and record.version == 2


async def test_a_save_that_is_written_again_as_redis_was_started_anew_is_still_to_come(
    edges: Edges, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def twice(_: RedoLog, write: Write, size: int = 0, again: Write | None = None) -> object:
        await write()
        return await (again or write)()

    async with edges.http() as client:
        model = await new_model(edges, client)
        monkeypatch.setattr(RedoLog, "perform", twice)
        await send(client, "save_weights_for_sampler", model_id=model, seq_id=1, sampling_session_seq_id=1)
    assert await edges.redis.zcard(keys.coming_snapshots("alice")) == 1
