"""HTTP: copies of checkpoints."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from services.common.contract import ids
from services.common.state import keys
from services.common.storage.base import Key
from services.gateway.access.limits import Limits
from services.gateway.records.stores import Stores
from services.gateway.retention.forget import Forgetting
from tests.unit.gateway.edge.http.copies.copying import SlowDisk, break_disk, copied, copy, runs_of
from tests.unit.gateway.edges import ALICE, BOB, Edges, new_model, new_session, running
from tests.unit.gateway.saved import CONTENT, export, save, save_sampler, url


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_copy_outlives_its_source_in_a_run_of_its_own(edges: Edges) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        path = await save(edges, client, model, 1, "a", user_metadata={"step": "1"}, ttl_seconds=3600)
        there = await copied(client, path)
        assert (await client.delete(url(path))).status_code == 200
        run, checkpoint = ids.parse_tinker_path(there)
        assert (run != model, checkpoint) == (True, "weights/a")
        (found,) = (await client.get(f"training_runs/{run}/checkpoints")).json()["checkpoints"]
        assert (found["size_bytes"], found["expires_at"]) == (len(CONTENT), None)
        assert found["user_metadata"] == {"step": "1"}
        runs = (await client.get("training_runs", params={"project_id": "archive"})).json()["training_runs"]
        assert [one["training_run_id"] for one in runs] == [run]
        with edges.files.storage.open(Key(run, checkpoint, 1), "adapter.safetensors") as file:
            assert file.read() == CONTENT
        session = await new_session(client)
        body = {"session_id": session, "model_seq_id": 0, "path": there, "optimizer": True}
        assert (await client.post("load_weights", json=body)).status_code == 200
        operation = await edges.operation(ids.model_id(session, 0), 0)
        assert operation is not None and operation.create_model.from_state.source_model_id == run
        assert (await client.delete(url(there))).status_code == 200
        assert edges.files.storage.files(Key(run, checkpoint, 1)) is None


async def test_a_copy_can_be_sampled_or_downloaded_as_its_source_can(edges: Edges) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        snapshot = await save_sampler(edges, client, model, 1, "s")
        run, _ = ids.parse_tinker_path(await copied(client, f"tinker://{model}/sampler_weights/s"))
        names = [path.name for path in edges.data.snapshot(run, 1).iterdir()]
        assert names == [path.name for path in snapshot.iterdir()]
        exported = await copied(client, await export(edges, client, model, 2, "e"))
        urls = (await client.get(f"{url(exported)}/external_weights_urls")).json()["urls"]
        assert (await client.get(urls["adapter.safetensors"])).content == CONTENT


async def test_a_repeated_request_makes_one_copy(edges: Edges) -> None:
    async with edges.http() as client:
        path = await save(edges, client, await new_model(edges, client), 1, "a")
        first = await copied(client, path, "k")
        assert await copied(client, path, "k") == first
        assert await copied(client, path, "k", ttl_seconds=3600) != first
        assert await copied(client, path) != first
        refused = await copy(client, path)
        assert (refused.status_code, refused.json()["code"]) == (429, "limit_reached")


async def test_a_request_that_is_repeated_meanwhile_joins_the_copy(edges: Edges, slow_disk: SlowDisk) -> None:
    async with edges.http() as client:
        path = await save(edges, client, await new_model(edges, client), 1, "a")
        given_up = asyncio.create_task(copied(client, path, "k"))
        assert await asyncio.to_thread(slow_disk.begun.wait, 30)
        given_up.cancel()
        again = asyncio.create_task(copied(client, path, "k"))
        slow_disk.goes_on.set()
        run, checkpoint = ids.parse_tinker_path(await again)
        assert edges.files.storage.files(Key(run, checkpoint, 1)) is not None
        assert slow_disk.copies == 1


async def test_copies_at_once_are_bounded_as_downloads_are(edges: Edges, slow_disk: SlowDisk) -> None:
    async with edges.http() as client:
        path = await save(edges, client, await new_model(edges, client), 1, "a")
        first = asyncio.create_task(copied(client, path))
        assert await asyncio.to_thread(slow_disk.begun.wait, 30)
        refused = await copy(client, path)
        assert (refused.status_code, refused.json()["code"]) == (429, "limit_reached")
        assert "--max-downloads" in refused.text
        slow_disk.goes_on.set()
        await first


async def test_a_key_waits_for_copies_under_way_and_not_for_those_that_another_has_waiting(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    may_end = threading.Semaphore(0)

    def waits(source: Key, target: Key, go_on: Callable[[], None]) -> int | None:
        begun.append(source.model_id)
        assert may_end.acquire(timeout=60)
        return copied_by_storage(source, target, go_on)

    async with (
        running(redis_url, tmp_path, Limits()) as edges,
        edges.http() as alice,
        edges.http(BOB) as bob,
    ):
        copied_by_storage = edges.files.storage.copy
        monkeypatch.setattr(edges.files.storage, "copy", waits)
        hers = await save(edges, alice, await new_model(edges, alice), 1, "a")
        his = await save(edges, bob, await new_model(edges, bob), 1, "a")
        made = [asyncio.create_task(copied(alice, hers)) for _ in range(4)]
        await until(lambda: len(edges.app.copies._copying) == 4 and len(begun) == 2)
        made.append(asyncio.create_task(copied(bob, his)))
        await until(lambda: len(edges.app.copies._copying) == 5)
        may_end.release()
        await until(lambda: len(begun) == 3)
        assert ids.parse_tinker_path(his)[0] == begun[2]
        may_end.release(4)
        await asyncio.gather(*made)


async def test_a_copy_in_a_session_takes_a_number_and_cannot_be_trained(edges: Edges) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        path = await save(edges, client, model, 1, "a")
        session = await new_session(client)
        for _ in range(2):
            there = await copied(client, path, session_id=session, model_seq_id=3)
            assert there == f"tinker://{session}:train:3/weights/a"
        step = {"model_id": f"{session}:train:3", "seq_id": 1, "adam_params": {}}
        refused = await client.post("optim_step", json=step)
        assert (refused.status_code, refused.json()["code"]) == (400, "copy_of_checkpoint")
        taken = await copy(client, path, session_id=ids.session_of(model), model_seq_id=0)
        assert taken.status_code == 409
        both = await copy(client, path, session_id=session)
        assert both.status_code == 400


async def test_what_another_key_may_not_read_is_copied_with_its_owners_key_only(edges: Edges) -> None:
    async with edges.http() as client, edges.http(BOB) as other:
        path = await save(edges, client, await new_model(edges, client), 1, "a")
        assert (await copy(other, path)).status_code == 404
        assert (await copy(other, path, weights_access_token="tml-nobody")).status_code == 403
        there = await copied(other, path, weights_access_token=ALICE)
        assert (await client.get(url(there).rpartition("/checkpoints/")[0])).status_code == 404
        assert (await copy(other, "tinker://x", weights_access_token=ALICE)).status_code == 400


async def test_a_copy_that_fails_leaves_no_run_and_no_session(
    edges: Edges, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with edges.http() as client:
        path = await save(edges, client, await new_model(edges, client), 1, "a")
        before = await runs_of(client)
        with monkeypatch.context() as broken:
            break_disk(edges, broken)
            failed = await copy(client, path, "k")
        assert (failed.status_code, failed.json()["code"]) == (507, "storage_full")
        assert await runs_of(client) == before
        (session,) = await edges.redis.zrangebyscore(keys.OVER_SESSIONS, 0, 0)
        await Forgetting(edges.redis, Stores.over(edges.redis), "gateway-0", 3600).sweep(time.time())
        assert not await edges.redis.exists(keys.session(session.decode()))
        # The same request makes it as soon as there is room.
        assert await copied(client, path, "k") == await copied(client, path, "k")
        assert len(await runs_of(client)) == len(before) + 1


async def test_the_number_of_a_copy_that_failed_can_be_used_again(
    edges: Edges, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with edges.http() as client:
        path = await save(edges, client, await new_model(edges, client), 1, "a")
        other = await save(edges, client, ids.parse_tinker_path(path)[0], 2, "b")
        session = await new_session(client)
        before = await runs_of(client)
        with monkeypatch.context() as broken:
            break_disk(edges, broken)
            failed = await copy(client, path, session_id=session, model_seq_id=3)
        assert failed.status_code == 507
        assert await runs_of(client) == before
        await copied(client, other, session_id=session, model_seq_id=3)
        assert await runs_of(client) == [f"{session}:train:3", *before]
