"""What makes room is done also while Redis has no memory left, and gateways start then."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest
import redis.asyncio

from services.common.contract import ids
from services.common.contract.errors import Unavailable
from services.common.state import keys
from services.common.storage.data_dir import DataDir
from services.gateway.audit import store as audit
from services.gateway.audit.record import AuditRecord
from services.gateway.audit.store import AuditStore
from services.gateway.dispatch.record_results import ResultRecorder
from services.gateway.records.checkpoint import CheckpointRecord
from services.gateway.records.session import SessionRecord
from services.gateway.records.stores import Stores
from services.gateway.retention.daily import Daily
from services.gateway.retention.forget import Forgetting
from services.gateway.retention.orphan_sweep import OrphanSweep
from services.gateway.retention.snapshot_plan import SnapshotBudget
from services.gateway.retention.snapshot_room import SnapshotRoom
from services.gateway.retention.snapshot_sweep import SnapshotSweep
from services.gateway.retention.sweep_lease import SweepLease
from tests.unit.gateway.full_redis import full
from tests.unit.gateway.retention.stage import DELETED, SETTLED, Stage
from tests.unit.gateway.scripted_services import BASE
from tinsmith.internal.v1 import operation_pb2
from tinsmith.v1 import results_pb2

SESSION = "0b0e9f2c-7a55-4c3e-9a43-000000000001"
MODEL = f"{SESSION}:train:0"


async def session(client: redis.asyncio.Redis, last_heartbeat: float = 1.0) -> Stores:
    """The records of a session of ann's."""
    stores = Stores.over(client)
    record = SessionRecord(
        session_id=SESSION, owner="ann", created_at=last_heartbeat, last_heartbeat=last_heartbeat
    )
    await stores.sessions.create(record, "key")
    return stores


def checkpoint(expires_at: float | None = None) -> CheckpointRecord:
    return CheckpointRecord(
        model_id=MODEL,
        checkpoint_id="weights/one",
        owner="ann",
        kind="training",
        version=1,
        size_bytes=10,
        created_at=1.0,
        expires_at=expires_at,
        base_model=BASE,
        lora_rank=8,
    )


async def test_a_gateway_takes_the_lease_on_a_sweep(any_redis: redis.asyncio.Redis) -> None:
    mine, other = (SweepLease(any_redis, keys.SNAPSHOT_SWEEP_LEASE, name) for name in ("a", "b"))
    async with full(any_redis):
        assert [await mine.take(), await mine.take(), await other.take()] == [True, True, False]
    assert 50_000 < await any_redis.pttl(keys.SNAPSHOT_SWEEP_LEASE) <= 60_000


async def test_a_gateway_becomes_one_that_may_have_samples(any_redis: redis.asyncio.Redis) -> None:
    samples = Stores.over(any_redis).samples
    async with full(any_redis):
        await samples.join("gateway-0")
    assert await samples.gateways() == {"gateway-0"}


async def test_a_snapshot_is_forgotten(any_redis: redis.asyncio.Redis) -> None:
    snapshots = Stores.over(any_redis).snapshots
    for version in (1, 2):
        await snapshots.add(MODEL, version, "ann", 10)
    async with full(any_redis):
        await snapshots.forget(MODEL, 1, "ann")
    assert await snapshots.owners() == {"ann": 10}
    assert [one.version for one in await snapshots.of_model(MODEL)] == [2]


async def test_snapshots_are_let_go_and_their_clients_told(
    any_redis: redis.asyncio.Redis, tmp_path: Path
) -> None:
    stores, data = Stores.over(any_redis), DataDir(tmp_path)
    for version in (1, 2):
        data.snapshot(MODEL, version).mkdir(parents=True)
        await stores.snapshots.add(MODEL, version, "ann", 60)
    await any_redis.zadd(keys.SNAPSHOTS_USED, {f"{MODEL}@1": 1.0})
    room = SnapshotRoom(stores.snapshots, data, SnapshotBudget(100, 100))
    async with full(any_redis):
        await SnapshotSweep(any_redis, stores, room, "gateway-0").sweep()
    assert [data.snapshot(MODEL, version).exists() for version in (1, 2)] == [False, True]
    assert await stores.snapshots.was_let_go(MODEL, 1)
    assert 29 * 86_400 < await any_redis.ttl(keys.let_go(MODEL)) <= 30 * 86_400


async def test_a_snapshot_that_sessions_left_goes(any_redis: redis.asyncio.Redis, tmp_path: Path) -> None:
    stores, data = Stores.over(any_redis), DataDir(tmp_path)
    data.snapshot(MODEL, 1).mkdir(parents=True)
    await stores.snapshots.add(MODEL, 1, "ann", 60)
    room = SnapshotRoom(stores.snapshots, data, SnapshotBudget(100, 100))
    async with full(any_redis):
        await stores.snapshots.supersede(MODEL, 1, time.time() - 1)
        await SnapshotSweep(any_redis, stores, room, "gateway-0").sweep()
    assert not data.snapshot(MODEL, 1).exists()
    assert await stores.snapshots.superseded(10) == []


async def test_a_snapshot_that_is_sampled_is_known_to_be(any_redis: redis.asyncio.Redis) -> None:
    snapshots = Stores.over(any_redis).snapshots
    await snapshots.add(MODEL, 1, "ann", 60)
    for name in (keys.SNAPSHOTS_USED, keys.owner_snapshots("ann")):
        await any_redis.zadd(name, {f"{MODEL}@1": 1.0})
    async with full(any_redis):
        await snapshots.note_used(MODEL, 1, "ann")
        await snapshots.note_used(MODEL, 2, "ann")
    for owner in (None, "ann"):
        (found,) = await snapshots.oldest(10, owner)
        assert found.version == 1
        assert found.last_used > 1.0


async def test_a_checkpoint_is_removed_and_its_files_are_due(any_redis: redis.asyncio.Redis) -> None:
    checkpoints = (await session(any_redis)).checkpoints
    await checkpoints.put(checkpoint())
    async with full(any_redis):
        assert await checkpoints.remove(checkpoint())
    assert await checkpoints.totals("ann") == (0, 0)
    assert await any_redis.zscore(keys.CHECKPOINTS_DUE, f"tinker://{MODEL}/weights/one@1") > time.time()


async def test_a_checkpoint_is_given_the_time_after_which_it_goes(any_redis: redis.asyncio.Redis) -> None:
    checkpoints = (await session(any_redis)).checkpoints
    await checkpoints.put(checkpoint())
    async with full(any_redis):
        assert await checkpoints.change(checkpoint(), checkpoint(expires_at=2.0))
        assert (await checkpoints.page("ann", 0, 10)).records == []
    assert [key.version for key in await checkpoints.due(10)] == [1]


async def test_the_client_of_a_session_is_heard(any_redis: redis.asyncio.Redis) -> None:
    sessions = (await session(any_redis)).sessions
    async with full(any_redis):
        await sessions.touch(SESSION)
    assert await any_redis.zscore(keys.SESSION_LIFE, SESSION) > 1.0
    assert (await sessions.get(SESSION)).last_heartbeat > 1.0  # type: ignore[union-attr]


async def test_a_session_ends_by_its_client_by_its_silence_or_because_nothing_came_to_be(
    any_redis: redis.asyncio.Redis,
) -> None:
    for end in ("finish", "abandon", "discard"):
        await any_redis.flushall()
        sessions = (await session(any_redis)).sessions
        record = await sessions.get(SESSION)
        assert record is not None
        async with full(any_redis):
            if end == "finish":
                await sessions.finish(SESSION, "success", "all is done")
            elif end == "abandon":
                assert await sessions.abandon(SESSION, 1.0)
                assert not await sessions.abandon(SESSION, 1.0)
            else:
                await sessions.discard(record, "key", "no room")
        found = await sessions.get(SESSION)
        assert found is not None
        assert (found.finished, found.abandoned) == (True, end == "abandon")
        said = {"finish": "all is done", "abandon": "", "discard": "no room"}
        assert found.finish_detail == said[end]
        assert await any_redis.zscore(keys.SESSION_LIFE, SESSION) is None
        assert await any_redis.zscore(keys.ENDED_SESSIONS, SESSION) is not None
        over = await any_redis.zscore(keys.OVER_SESSIONS, SESSION)
        assert (over == 0.0) == (end == "discard")


async def test_a_silent_session_is_parked_and_one_that_is_over_taken_down(stage: Stage) -> None:
    silent, over = await stage.session(), await stage.session()
    parked, ended = await stage.model(silent), await stage.model(over)
    async with full(stage.redis):
        await stage.sessions.finish("ann", over, "success", "")
        await stage.sweep(later=SETTLED)
        await stage.sweep(later=DELETED)
        assert ended not in stage.trainer.disk
        assert await stage.journal_keys(ended) == {"meta"}
        assert (await stage.models.get(ended)).status == "unloaded"  # type: ignore[union-attr]
        await stage.sweep(later=DELETED + 60)
        assert await stage.redis.zcard(keys.ENDED_MODELS) == 0
        await stage.sweep(later=200)
        assert parked not in stage.trainer.models
    assert await stage.redis.zscore(keys.PARKED_SESSIONS, silent) is not None


async def test_a_model_is_unloaded_and_nothing_else_is_taken_on(stage: Stage) -> None:
    model_id = await stage.model(await stage.session())
    async with full(stage.redis):
        assert (await stage.run(model_id, 2, unload_model=operation_pb2.UnloadModel())).HasField(
            "unload_model"
        )
        await stage.sweep(later=6)
        assert model_id not in stage.trainer.disk
    assert (await stage.models.get(model_id)).status == "unloaded"  # type: ignore[union-attr]


async def test_a_session_is_forgotten(any_redis: redis.asyncio.Redis) -> None:
    stores = await session(any_redis)
    await stores.sessions.finish(SESSION, "success", "")
    async with full(any_redis):
        await Forgetting(any_redis, stores, "gateway-0", forget_after=10).sweep(time.time() + 20)
    assert await stores.sessions.get(SESSION) is None
    assert await any_redis.zcard(keys.OVER_SESSIONS) == 0


async def test_records_of_acts_beyond_their_number_go(
    any_redis: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "MOST_OF_OWNERS", 10)
    store = AuditStore(any_redis)
    record = AuditRecord(id="", at=time.time(), event="model_create", outcome="ok", owner="ann", object="m")
    await store.add([msgspec.structs.replace(record, id=str(number)) for number in range(30)])
    async with full(any_redis):
        await store.sweep()
    assert await any_redis.xlen(keys.audit("ann", "done")) == 10


async def test_what_was_saved_is_written_down_so_that_its_model_may_go(stage: Stage) -> None:
    model_id = await stage.model(await stage.session())
    saves = {
        2: operation_pb2.SaveState(checkpoint_id="weights/one"),
        3: operation_pb2.SaveForSampler(checkpoint_id="sampler_weights/one"),
        4: operation_pb2.SaveForSampler(sampling_session_id=f"{ids.session_of(model_id)}:sample:0"),
    }
    async with full(stage.redis):
        recorder = ResultRecorder(stage.stores)
        for seq_id, save in saves.items():
            kind = "save_state" if seq_id == 2 else "save_for_sampler"
            operation = operation_pb2.Operation(model_id=model_id, seq_id=seq_id, **{kind: save})  # type: ignore[arg-type]
            result = results_pb2.OperationResult()
            getattr(result, kind).size_bytes = 10
            assert await recorder.record(operation, result) == result
    assert [record.version for record in await stage.checkpoints.of_model(model_id)] == [2, 3]
    assert [one.version for one in await stage.stores.snapshots.of_model(model_id)] == [4]
    assert await stage.samplers.of_model(model_id, 4) == [(f"{ids.session_of(model_id)}:sample:0", 4)]
    assert await stage.store.samplers(ids.session_of(model_id)) == [f"{ids.session_of(model_id)}:sample:0"]


async def test_what_is_done_once_a_day_is_done_and_orphans_are_found(
    any_redis: redis.asyncio.Redis, tmp_path: Path
) -> None:
    done: list[str] = []

    async def work() -> None:
        done.append("once")
        if len(done) == 2:
            raise OSError("the disk is away")

    data, known = DataDir(tmp_path), ids.model_id(SESSION, 1)
    for model_id in (MODEL, known):
        data.snapshot(model_id, 1).mkdir(parents=True)
    await any_redis.hset(keys.model(known), "record", "")
    orphans = OrphanSweep(any_redis, data)
    await orphans.look(0.0, 0.0)
    await any_redis.delete(keys.ORPHANED_MODELS)
    daily = Daily(any_redis, "work of a test", "a-mark", work)
    async with full(any_redis):
        for _ in range(2):
            await daily.look()
        assert done == ["once"]
        assert await any_redis.delete("a-mark")
        with pytest.raises(OSError, match="the disk is away"):
            await daily.look()
        with pytest.raises(Unavailable, match="the disk is away"):
            await daily.look()
        await orphans.look(0.0, 0.0)
        assert data.snapshots(MODEL).exists()
        await orphans.look(86_400.0, 86_400.0)
    assert [data.snapshots(one).exists() for one in (MODEL, known)] == [False, True]
