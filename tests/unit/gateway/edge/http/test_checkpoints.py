"""HTTP: checkpoints, from what operations came to until nothing is left of it."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from contextlib import suppress

import pytest

from services.common.contract import ids
from services.common.contract.errors import Unavailable
from services.common.state import keys
from services.common.storage.base import Key
from services.gateway.access.limits import Limits
from services.gateway.records.checkpoint import CheckpointRecord
from tests.unit.gateway.edge.http.batches import raising
from tests.unit.gateway.edges import BOB, Edges, new_model, new_session
from tests.unit.gateway.saved import CONTENT, SNAPSHOT_BYTES, expire, export, names, save, save_sampler, url


@pytest.fixture
def limits() -> Limits:
    return Limits(min_ttl_seconds=1)


async def test_a_page_shows_the_newest_checkpoints_of_all_runs_of_the_caller(edges: Edges) -> None:
    async with edges.http() as client, edges.http(BOB) as other:
        model, second = await new_model(edges, client), await new_model(edges, client)
        await save(edges, client, model, 1, "a", user_metadata={"step": "1"})
        await save(edges, client, second, 1, "b")
        await save(edges, client, model, 2, None)
        await save(edges, client, model, 3, "a", overwrite=True)
        assert await names(client) == ["weights/a", "weights/000002", "weights/b"]
        assert await names(client, limit=1, offset=1) == ["weights/000002"]
        assert await names(client, limit=0) == []
        page = (await client.get("checkpoints", params={"limit": 2, "offset": 2})).json()
        assert page["cursor"] == {"offset": 2, "limit": 2, "total_count": 3}
        assert await names(other) == []
        of_run = (await client.get(f"training_runs/{model}/checkpoints")).json()["checkpoints"]
        assert [found["checkpoint_id"] for found in of_run] == ["weights/a", "weights/000002"]
        assert of_run[0]["size_bytes"] == len(CONTENT)
        assert of_run[0]["user_metadata"] is None, "an overwrite replaces the metadata"
        for params in ({"limit": 1001}, {"limit": "x"}, {"offset": -1}):
            assert (await client.get("checkpoints", params=params)).status_code == 400


async def test_a_replaced_version_loses_its_files(edges: Edges) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        await save(edges, client, model, 1, "a")
        await save(edges, client, model, 2, "a", overwrite=True)
        await edges.redis.zadd(keys.CHECKPOINTS_DUE, {f"tinker://{model}/weights/a@1": 1})
        await edges.sweep.sweep()
        assert edges.files.storage.versions(model, "weights/a") == [2]
        assert await due_in(edges, f"tinker://{model}/weights/a@1") > 3000


async def due_in(edges: Edges, member: str) -> float:
    """Seconds until a version is looked at again."""
    at = await edges.redis.zscore(keys.CHECKPOINTS_DUE, member)
    assert at is not None
    return at - time.time()


async def test_the_files_of_a_deleted_version_go_when_nobody_reads_them_any_more(edges: Edges) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        path = await save(edges, client, model, 1, "a")
        assert (await client.delete(url(path))).status_code == 200
        parent = edges.data.checkpoints / model / "weights" / "a"
        hidden = next(parent.iterdir())
        os.utime(hidden, (time.time() - 4000,) * 2)
        await edges.redis.zadd(keys.CHECKPOINTS_DUE, {f"{path}@1": 1})
        await edges.sweep.sweep()
        assert not parent.exists()
        assert await edges.redis.zcard(keys.CHECKPOINTS_DUE) == 0


async def test_files_whose_removal_hangs_keep_no_others(
    edges: Edges, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    delete = edges.files.storage.delete

    def slow(key: Key) -> float | None:
        if key.checkpoint_id == "weights/hangs":
            goes_on.wait(60)
        return delete(key)

    monkeypatch.setattr(edges.files.storage, "delete", slow)
    async with edges.http() as client:
        model = await new_model(edges, client)
        for seq_id, name in ((1, "hangs"), (2, "b")):
            path = await save(edges, client, model, seq_id, name)
            await edges.records.remove(await record_of(edges, path))
            await edges.redis.zadd(keys.CHECKPOINTS_DUE, {f"{path}@{seq_id}": seq_id})
        try:
            async with asyncio.timeout(30):
                while edges.files.storage.files(Key(model, "weights/b", 2)) is not None:
                    # As the deadline of a sweep does.
                    with suppress(TimeoutError):
                        async with asyncio.timeout(0.5):
                            await edges.sweep.sweep()
        finally:
            goes_on.set()


async def record_of(edges: Edges, path: str) -> CheckpointRecord:
    record = await edges.records.get(*ids.parse_tinker_path(path))
    assert record is not None
    return record


async def test_a_deleted_checkpoint_is_gone_and_its_name_free(edges: Edges) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        path = await save(edges, client, model, 1, "a")
        assert (await client.delete(url(path))).status_code == 200
        assert await names(client) == []
        assert edges.files.storage.versions(model, "weights/a") == []
        assert await due_in(edges, f"{path}@1") > 3000
        assert (await client.post("weights_info", json={"tinker_path": path})).status_code == 404
        assert (await client.delete(url(path))).status_code == 404
        await save(edges, client, model, 2, "a")
        assert await names(client) == ["weights/a"]


async def test_a_checkpoint_that_is_missing_right_after_a_restart_of_redis_is_not_called_unknown(
    edges: Edges, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its save came to may have been in the second that Redis lost, and is written down again."""
    async with edges.http() as client:
        model = await new_model(edges, client)
        path = f"tinker://{model}/weights/a"
        load = {"model_id": model, "path": path, "seq_id": 1, "optimizer": True}
        with monkeypatch.context() as restarted:
            restoring = raising(Unavailable("the state store has just restarted"))
            restarted.setattr(edges.app.redo_log, "refuse_while_restoring", restoring)
            assert (await client.post("weights_info", json={"tinker_path": path})).status_code == 503
            assert (await client.post("load_weights", json=load)).status_code == 503
            gone = {"tinker_path": "tinker://nobody:train:0/weights/a"}
            assert (await client.post("weights_info", json=gone)).status_code == 503
            async with edges.http(BOB) as other:
                # It may be published.
                assert (await other.post("weights_info", json={"tinker_path": path})).status_code == 503
        await save(edges, client, model, 1, "a")
        assert (await client.post("weights_info", json={"tinker_path": path})).status_code == 200
        assert (await client.post("load_weights", json={**load, "seq_id": 2})).status_code == 200


async def test_files_that_a_crash_left_behind_are_found(edges: Edges) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        await save(edges, client, model, 1, "a")
        record = await edges.app.checkpoints.owned("alice", model, "weights/a")
        # The gateway that deletes it dies before it comes to the files.
        assert await edges.records.remove(record)
        await edges.sweep.sweep()
        assert edges.files.storage.versions(model, "weights/a") == [1], "somebody may be at it"
        await edges.redis.zadd(keys.CHECKPOINTS_DUE, {f"tinker://{model}/weights/a@1": 1})
        await edges.sweep.sweep()
        assert edges.files.storage.versions(model, "weights/a") == []


async def test_an_expired_checkpoint_is_in_no_answer_and_swept_away(edges: Edges) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        path = await save(edges, client, model, 1, "a", ttl_seconds=1)
        await save(edges, client, model, 2, "b")
        assert await names(client) == ["weights/b", "weights/a"]
        await expire(edges, path)
        page = (await client.get("checkpoints")).json()
        assert page["cursor"]["total_count"] == len(page["checkpoints"]) == 1
        of_run = (await client.get(f"training_runs/{model}/checkpoints")).json()["checkpoints"]
        assert [found["checkpoint_id"] for found in of_run] == ["weights/b"]
        run = (await client.get(f"training_runs/{model}")).json()
        assert run["last_checkpoint"]["checkpoint_id"] == "weights/b"
        for answer in (
            await client.post("weights_info", json={"tinker_path": path}),
            await client.put(f"{url(path)}/ttl", json={"ttl_seconds": None}),
            await client.delete(url(path)),
        ):
            assert answer.status_code == 404
        await edges.sweep.sweep()
        assert edges.files.storage.versions(model, "weights/a") == []
        assert await due_in(edges, f"{path}@1") > 3000
        assert await edges.redis.hlen(keys.checkpoints(model)) == 1


async def test_a_name_whose_checkpoint_expired_can_be_used_before_any_sweep(edges: Edges) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        path = await save(edges, client, model, 1, "a", ttl_seconds=1)
        await expire(edges, path)
        await save(edges, client, model, 2, "a")
        assert edges.files.storage.versions(model, "weights/a") == [2]
        await edges.sweep.sweep()
        assert await names(client) == ["weights/a"]


async def test_a_ttl_can_be_changed_and_taken_away(edges: Edges) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        path = await save(edges, client, model, 1, "a", ttl_seconds=1)
        assert (await client.put(f"{url(path)}/ttl", json={"ttl_seconds": None})).status_code == 200
        await expire(edges, path)
        await edges.sweep.sweep()
        assert await names(client) == ["weights/a"]
        assert await edges.redis.zcard(keys.CHECKPOINTS_DUE) == 0
        before = time.time()
        assert (await client.put(f"{url(path)}/ttl", json={"ttl_seconds": 5000})).status_code == 200
        record = await edges.app.checkpoints.owned("alice", model, "weights/a")
        assert record.expires_at is not None and 4999 < record.expires_at - before < 5100
        for wrong in ({"ttl_seconds": 0}, {"ttl_seconds": 10**12}, {}, {"ttl_seconds": "x"}):
            assert (await client.put(f"{url(path)}/ttl", json=wrong)).status_code == 400


async def test_only_the_owner_changes_a_checkpoint(edges: Edges) -> None:
    async with edges.http() as client, edges.http(BOB) as other:
        model = await new_model(edges, client)
        path = url(await save(edges, client, model, 1, "a"))
        for published in (False, True):
            if published:
                assert (await client.post(f"{path}/publish")).status_code == 200
            for answer in (
                await other.delete(path),
                await other.post(f"{path}/publish"),
                await other.delete(f"{path}/publish"),
                await other.put(f"{path}/ttl", json={"ttl_seconds": None}),
            ):
                # Everybody may know of a published one.
                assert answer.status_code == (403 if published else 404)
            for answer in (
                await other.get(f"training_runs/{model}"),
                await other.post("unload_model", json={"model_id": model}),
            ):
                assert answer.status_code == 404
        assert (await other.delete(f"training_runs/{model}/checkpoints/other/a")).status_code == 400
        missing = await other.delete("training_runs/nobody:train:0/checkpoints/weights/a")
        assert missing.status_code == 404


async def test_a_run_is_accessible_by_any_published_checkpoint_of_it(edges: Edges) -> None:
    async with edges.http() as client, edges.http(BOB) as other:
        model = await new_model(edges, client)
        path = await export(edges, client, model, 1, "e")
        run = f"training_runs/{model}?access_scope=accessible"
        assert (await other.get(run)).status_code == 404
        assert (await client.post(f"{url(path)}/publish")).status_code == 200
        assert (await other.get(run)).json()["training_run_id"] == model
        assert (await other.get(f"training_runs/{model}")).status_code == 404


async def test_a_published_checkpoint_can_be_read_loaded_and_sampled_by_others(edges: Edges) -> None:
    async with edges.http() as client, edges.http(BOB) as other:
        model = await new_model(edges, client)
        weights = await save(edges, client, model, 1, "a")
        await save_sampler(edges, client, model, 2, "s")
        sampler = ids.tinker_path(model, "sampler_weights/s")
        session = await new_session(other)
        load = {"session_id": session, "model_seq_id": 0, "path": weights, "optimizer": False}
        sample = {"session_id": session, "sampling_session_seq_id": 0, "model_path": sampler}
        info = {"tinker_path": weights}
        listed = f"training_runs/{model}/checkpoints"

        async def statuses() -> list[int]:
            return [
                (await other.post("weights_info", json=info)).status_code,
                (await other.post("load_weights", json=load)).status_code,
                (await other.post("create_sampling_session", json=sample)).status_code,
                (await other.get(listed)).status_code,
                (await other.get(f"training_runs/{model}?access_scope=accessible")).status_code,
            ]

        assert await statuses() == [404] * 5
        for path in (weights, sampler):
            assert (await client.post(f"{url(path)}/publish")).status_code == 200
        assert await statuses() == [200] * 5
        sizes = {
            one["checkpoint_id"]: one["size_bytes"] for one in (await other.get(listed)).json()["checkpoints"]
        }
        assert sizes == {"weights/a": len(CONTENT), "sampler_weights/s": SNAPSHOT_BYTES}
        assert (await other.get("checkpoints")).json()["checkpoints"] == []
        for path in (weights, sampler):
            assert (await client.delete(f"{url(path)}/publish")).status_code == 200
        load["model_seq_id"] = sample["sampling_session_seq_id"] = 1
        assert await statuses() == [404] * 5


async def test_a_deleted_sampler_checkpoint_leaves_its_sampling_sessions_what_they_answer_from(
    edges: Edges,
) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        directory = await save_sampler(edges, client, model, 1, "s")
        path = ids.tinker_path(model, "sampler_weights/s")
        session = await new_session(client)
        body = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
        assert (await client.post("create_sampling_session", json=body)).status_code == 200
        assert (await client.delete(url(path))).status_code == 200
        body["sampling_session_seq_id"] = 1
        assert (await client.post("create_sampling_session", json=body)).status_code == 404

        async def sweep() -> bool:
            await edges.redis.zadd(keys.CHECKPOINTS_DUE, {f"{path}@1": 1})
            await edges.sweep.sweep()
            return directory.exists()

        assert await sweep()
        assert (await client.get(f"samplers/{session}:sample:0")).status_code == 200
        finish = {"reason": {"type": "success"}, "detail": None}
        assert (await client.post(f"sessions/{session}/finish", json=finish)).status_code == 200
        assert not await sweep()


async def test_a_checkpoint_whose_record_cannot_be_read_hides_no_other_and_keeps_its_files(
    edges: Edges,
) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        await save(edges, client, model, 1, "broken", ttl_seconds=3600)
        await save(edges, client, model, 2, "a")
        await save(edges, client, model, 3, "a", overwrite=True)
        await edges.redis.hset(keys.checkpoints(model), "weights/broken", "{}")
        assert await names(client) == ["weights/a"]
        assert (await client.get(f"training_runs/{model}/checkpoints")).status_code == 500
        member = f"tinker://{model}/weights/broken@1"
        due = {"no checkpoint": 0, member: 0, f"tinker://{model}/weights/a@2": 1}
        await edges.redis.zadd(keys.CHECKPOINTS_DUE, due)
        await edges.sweep.sweep()
        assert edges.files.storage.versions(model, "weights/a") == [3]
        assert edges.files.storage.versions(model, "weights/broken") == [1]
        assert await due_in(edges, member) > 0
        assert await due_in(edges, "no checkpoint") > 3600


async def test_an_sdk_that_knows_no_exports_can_still_list_the_others(edges: Edges) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        await save(edges, client, model, 1, "a")
        await export(edges, client, model, 2, "e")
        client.headers["x-stainless-package-version"] = "0.25.0"
        assert await names(client) == ["weights/a"]
        client.headers["x-stainless-package-version"] = "0.28.0"
        assert await names(client) == ["external_weights/e", "weights/a"]


async def test_however_often_files_cannot_be_removed_the_log_has_the_first_time_and_the_end(
    edges: Edges, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with edges.http() as client:
        model = await new_model(edges, client)
        path = await save(edges, client, model, 1, "a")
        record = await record_of(edges, path)
    assert await edges.records.remove(record)
    delete = edges.files.storage.delete

    def fails(key: Key) -> float | None:
        raise OSError(30, "Read-only file system")

    for storage in (fails, fails, fails, delete):
        monkeypatch.setattr(edges.files.storage, "delete", storage)
        await edges.redis.zadd(keys.CHECKPOINTS_DUE, {f"{path}@1": 1})
        await edges.sweep.sweep()
    name = f"{model}/weights/a/1"
    assert [one for one in caplog.messages if "stay for now" in one] == [
        f"files of a checkpoint stay for now: {name}: [Errno 30] Read-only file system",
        f"files of a checkpoint stay for now: no more of {name}, after 3 failures",
    ]
