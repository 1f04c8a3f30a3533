"""HTTP: copies of checkpoints."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from services.common.contract import ids
from services.common.storage.base import Key
from services.gateway.access.limits import Limits, OwnerLimits
from tests.unit.gateway.edges import ALICE, BOB, Edges, new_model, new_session
from tests.unit.gateway.saved import CONTENT, export, save, save_sampler, url


@pytest.fixture
def limits() -> Limits:
    return Limits(owners=OwnerLimits(checkpoints=4, downloads=2))


class SlowDisk:
    """Copies of the storage wait until they may go on."""

    def __init__(self, edges: Edges, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = threading.Event()
        self.goes_on = threading.Event()
        self.copies = 0
        self._copy = edges.files.storage.copy
        monkeypatch.setattr(edges.files.storage, "copy", self.copy)

    def copy(self, source: Key, target: Key) -> int | None:
        self.copies += 1
        self.begun.set()
        assert self.goes_on.wait(30)
        return self._copy(source, target)


@pytest.fixture
def slow_disk(edges: Edges, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    disk = SlowDisk(edges, monkeypatch)
    yield disk
    disk.goes_on.set()


async def copy(client: httpx.AsyncClient, path: str, key: str = "", **fields: Any) -> httpx.Response:
    """A copy into the project "archive", unless the fields say otherwise."""
    where = {} if "session_id" in fields else {"destination_project_id": "archive"}
    headers = {"x-idempotency-key": key} if key else {}
    return await client.post("copy_weights", json={"source_path": path, **where, **fields}, headers=headers)


async def copied(client: httpx.AsyncClient, path: str, key: str = "", **fields: Any) -> str:
    response = await copy(client, path, key, **fields)
    assert response.status_code == 200, response.text
    return response.json()["tinker_path"]


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
        assert (await copy(other, path)).status_code == 403
        assert (await copy(other, path, weights_access_token="tml-nobody")).status_code == 403
        there = await copied(other, path, weights_access_token=ALICE)
        assert (await client.get(url(there).rpartition("/checkpoints/")[0])).status_code == 403
        assert (await copy(other, "tinker://x", weights_access_token=ALICE)).status_code == 400
