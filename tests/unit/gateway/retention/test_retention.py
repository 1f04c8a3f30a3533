"""Silent sessions are parked, ended ones taken down, and nothing accepted is lost over it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import redis.asyncio

from services.common.contract import errors, ids
from services.common.contract.errors import Gone, InvalidRequest
from services.common.state import keys, known_models
from services.common.state.journal import Journal
from services.common.state.registry import Registry
from services.common.state.room import Room
from services.common.storage.data_dir import DataDir
from services.gateway.access.limits import Limits
from services.gateway.cluster.discovery import Discovery
from services.gateway.cluster.redis_restart import RedoLog
from services.gateway.dispatch.dispatcher import Dispatcher
from services.gateway.dispatch.leases import Lease
from services.gateway.dispatch.plan import DispatchSettings
from services.gateway.dispatch.record_results import ResultRecorder
from services.gateway.records.checkpoint import CheckpointRecord
from services.gateway.records.model import ModelRecord
from services.gateway.records.sampling_session import SamplingSessionRecord
from services.gateway.records.session import SessionRecord
from services.gateway.records.stores import Stores
from services.gateway.records.usage import UsageStore
from services.gateway.results.futures import Futures
from services.gateway.retention import retention as retention_module
from services.gateway.retention.forget import Forgetting
from services.gateway.retention.plan import RetentionSettings, longer
from services.gateway.retention.retention import Retention
from services.gateway.sessions.sessions import NewSession, Sessions
from services.gateway.timelines.timelines import Timelines
from tests.unit.gateway.scripted_services import BASE, ScriptedTrainer, serving
from tinsmith.internal.v1 import operation_pb2
from tinsmith.v1 import models_pb2, results_pb2, training_pb2

SETTINGS = RetentionSettings(park_after=100, end_after=1000, snapshot_grace=50)
SETTLED = 3.0
DELETED = SETTLED + 6.0
"""Sweeps at these two times, after a session has ended, close its models and delete what they had."""


class Stage:
    """One gateway's dispatch and retention, over a scripted trainer. Sweeps are made by hand."""

    def __init__(self, client: redis.asyncio.Redis, trainer: ScriptedTrainer, data: DataDir) -> None:
        self.redis = client
        self.data = data
        self.trainer = trainer
        self.journal = Journal(client)
        self.futures = Futures(client)
        self.stores = stores = Stores.over(client)
        self.models, self.checkpoints, self.store = stores.models, stores.checkpoints, stores.sessions
        self.samplers = stores.sampling_sessions
        self.sessions = Sessions(self.store, Limits(), RedoLog(client), Room())
        self.discovery = Discovery(client, self.stores.poison)
        self.dispatcher = Dispatcher(
            client,
            self.journal,
            stores,
            self.discovery.trainers,
            self.futures,
            "gateway-0",
            ResultRecorder(stores).record,
            Timelines(client, Room()),
            DispatchSettings(idle_release=0.01),
        )
        self.cancelled: list[str] = []
        self.retention = self.another("gateway-0")

    def another(self, gateway_id: str) -> Retention:
        return Retention(
            self.redis,
            self.journal,
            self.stores,
            self.dispatcher,
            self.discovery.trainers,
            self._cancel_samples,
            self.data,
            gateway_id,
            SETTINGS,
        )

    async def _cancel_samples(self, session_id: str, reason: str) -> int:
        self.cancelled.append(session_id)
        return 0

    async def sweep(self, later: float = 0.0) -> None:
        """One sweep, as if some seconds had passed."""
        for _ in range(200):
            if not self.dispatcher._leading:
                break
            await asyncio.sleep(0.01)
        await self.retention.sweep(time.time() + later)

    async def session(self) -> str:
        return await self.sessions.create("ann", NewSession(), None)

    async def record(self, session_id: str) -> SessionRecord:
        record = await self.store.get(session_id)
        assert record is not None
        return record

    async def model(self, session_id: str, base_model: str = BASE) -> str:
        """A model with one step done, durable."""
        model_id = ids.model_id(session_id, 0)
        lora = models_pb2.LoraConfig(rank=8)
        record = ModelRecord(
            model_id=model_id,
            session_id=session_id,
            owner="ann",
            base_model=base_model,
            lora_rank=8,
            created_at=time.time(),
        )
        await self.models.create_if_absent(record)
        made = operation_pb2.CreateModel(base_model=base_model, lora=lora)
        await self.run(model_id, 0, create_model=made)
        await self.step(model_id, 1)
        return model_id

    async def accept(self, model_id: str, seq_id: int, **kind: object) -> None:
        operation = operation_pb2.Operation(model_id=model_id, seq_id=seq_id, **kind)  # type: ignore[arg-type]
        await self.journal.accept(operation, "ann")
        self.dispatcher.wake(model_id)

    async def result(self, model_id: str, seq_id: int) -> results_pb2.OperationResult:
        view = await self.futures.wait(ids.request_id(model_id, seq_id), 10)
        assert view.state == "done", view
        return results_pb2.OperationResult.FromString(view.result or b"")

    async def run(self, model_id: str, seq_id: int, **kind: object) -> results_pb2.OperationResult:
        await self.accept(model_id, seq_id, **kind)
        return await self.result(model_id, seq_id)

    async def step(self, model_id: str, seq_id: int) -> results_pb2.OperationResult:
        adam = training_pb2.AdamParams(learning_rate=0.1)
        return await self.run(model_id, seq_id, optim_step=operation_pb2.OptimStep(adam=adam))

    async def journal_keys(self, model_id: str) -> set[str]:
        names = {
            keys.journal: "journal",
            keys.journal_order: "order",
            keys.journal_pending: "pending",
            keys.journal_meta: "meta",
        }
        return {name for key, name in names.items() if await self.redis.exists(key(model_id))}


@pytest.fixture
def data(tmp_path: Path) -> DataDir:
    return DataDir(tmp_path)


@pytest.fixture
async def stage(redis_client: redis.asyncio.Redis, data: DataDir) -> AsyncIterator[Stage]:
    trainer = ScriptedTrainer(Journal(redis_client), {})
    async with serving(redis_client, trainer, "trainer-0"):
        made = Stage(redis_client, trainer, data)
        parts = (made.futures, made.discovery, made.dispatcher)
        for part in parts:
            await part.start()
        yield made
        for part in reversed(parts):
            await part.stop()


async def test_a_silent_session_is_parked_and_goes_on_where_it_was(stage: Stage) -> None:
    session_id = await stage.session()
    model_id = await stage.model(session_id)
    forward = training_pb2.ForwardBackward(loss_fn="cross_entropy")
    await stage.run(model_id, 2, forward_backward=forward)
    await stage.sweep(later=50)
    assert stage.trainer.parked == []
    await stage.sweep(later=200)
    assert stage.trainer.parked == [model_id]
    assert model_id not in stage.trainer.models
    await stage.sweep(later=205)
    assert stage.trainer.parked == [model_id]
    # The gradient of operation 2 was in no snapshot: it is computed again.
    await stage.step(model_id, 3)
    assert stage.trainer.restored == [model_id]
    assert stage.trainer.models[model_id].effects == [0, 1, 2, 3]


async def test_a_session_that_came_back_is_parked_again_when_it_falls_silent_again(stage: Stage) -> None:
    session_id = await stage.session()
    model_id = await stage.model(session_id)
    await stage.sweep(later=200)
    await stage.sessions.heartbeat("ann", session_id)
    await stage.step(model_id, 2)
    await stage.sweep(later=50)
    assert stage.trainer.parked == [model_id]
    await stage.sweep(later=200)
    assert stage.trainer.parked == [model_id, model_id]


async def test_a_model_that_gets_work_while_it_is_looked_at_is_not_parked(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_id = await stage.model(await stage.session())
    lead_idle = stage.dispatcher.lead_idle

    async def lead_late(led: str, work: Callable[[Lease], Awaitable[bool]]) -> bool:
        # Accepted by another gateway, after the sweep saw that nothing waits.
        adam = training_pb2.AdamParams(learning_rate=0.1)
        step = operation_pb2.OptimStep(adam=adam)
        operation = operation_pb2.Operation(model_id=model_id, seq_id=2, optim_step=step)
        await stage.journal.accept(operation, "ann")
        return await lead_idle(led, work)

    monkeypatch.setattr(stage.dispatcher, "lead_idle", lead_late)
    await stage.sweep(later=200)
    assert stage.trainer.parked == []
    stage.dispatcher.wake(model_id)
    assert (await stage.result(model_id, 2)).HasField("optim_step")


async def test_a_session_with_work_is_not_parked_until_it_is_done(stage: Stage) -> None:
    session_id = await stage.session()
    model_id = await stage.model(session_id)
    stage.trainer.gate.clear()
    step = operation_pb2.OptimStep(adam=training_pb2.AdamParams(learning_rate=0.1))
    await stage.accept(model_id, 2, optim_step=step)
    await stage.retention.sweep(time.time() + 200)
    assert stage.trainer.parked == []
    stage.trainer.gate.set()
    assert (await stage.result(model_id, 2)).HasField("optim_step")
    await stage.sweep(later=200)
    assert stage.trainer.parked == [model_id]


async def test_samples_of_a_silent_and_of_an_ended_session_are_given_up(stage: Stage) -> None:
    silent, ended, living = [await stage.session() for _ in range(3)]
    await stage.redis.zadd(keys.SESSION_LIFE, {living: time.time() + 150})
    await stage.sessions.finish("ann", ended, "success", "")
    await stage.sweep(later=200)
    assert sorted(stage.cancelled) == sorted([silent, ended])


async def test_a_request_counts_as_a_sign_of_life(stage: Stage) -> None:
    session_id = await stage.session()
    await stage.redis.zadd(keys.SESSION_LIFE, {session_id: 1.0})
    await stage.redis.hset(keys.session(session_id), "last_heartbeat", "1.0")
    await stage.sessions.open("ann", session_id)
    assert (await stage.redis.zscore(keys.SESSION_LIFE, session_id) or 0) > time.time() - 10
    record = await stage.store.get(session_id)
    assert record is not None and record.last_heartbeat > time.time() - 10


async def test_a_session_that_is_silent_for_very_long_is_over_and_its_state_deleted(stage: Stage) -> None:
    session_id = await stage.session()
    model_id = await stage.model(session_id)
    await stage.sweep(later=2000)
    with pytest.raises(Gone, match="nothing was heard of it"):
        await stage.sessions.heartbeat("ann", session_id)
    await stage.sweep(later=2000)
    assert await stage.journal.is_closed(model_id)
    assert model_id in stage.trainer.disk
    await stage.sweep(later=2006)
    assert model_id not in stage.trainer.models
    assert model_id not in stage.trainer.disk
    assert await stage.journal_keys(model_id) == {"meta"}
    assert (await stage.step(model_id, 2)).error.code == "session_finished"
    assert (await stage.models.get(model_id)).status == "unloaded"  # type: ignore[union-attr]


async def test_a_sign_of_life_at_the_last_moment_keeps_the_session(stage: Stage) -> None:
    session_id = await stage.session()
    record = await stage.store.get(session_id)
    assert record is not None
    await stage.store.touch(session_id)
    assert not await stage.store.abandon(session_id, record.last_heartbeat)
    await stage.sessions.heartbeat("ann", session_id)


async def test_a_finished_session_is_taken_down_after_what_was_accepted_is_done(stage: Stage) -> None:
    session_id = await stage.session()
    model_id = await stage.model(session_id)
    stage.trainer.gate.clear()
    step = operation_pb2.OptimStep(adam=training_pb2.AdamParams(learning_rate=0.1))
    await stage.accept(model_id, 2, optim_step=step)
    await stage.sessions.finish("ann", session_id, "success", "")
    await stage.retention.sweep(time.time() + SETTLED)
    assert model_id in stage.trainer.disk
    stage.trainer.gate.set()
    assert (await stage.result(model_id, 2)).HasField("optim_step")
    assert stage.trainer.order(model_id) == [0, 1, 2]
    await stage.sweep(later=SETTLED)
    await stage.sweep(later=DELETED)
    assert model_id not in stage.trainer.disk
    # The result can still be fetched.
    assert (await stage.result(model_id, 2)).HasField("optim_step")


async def test_snapshots_go_after_their_grace_except_those_with_a_name(stage: Stage) -> None:
    session_id = await stage.session()
    model_id = await stage.model(session_id)
    await stage.checkpoints.put(
        CheckpointRecord(
            model_id=model_id,
            checkpoint_id="sampler_weights/kept",
            owner="ann",
            kind="sampler",
            version=7,
            size_bytes=1,
            created_at=1.0,
            base_model=BASE,
            lora_rank=8,
        )
    )
    # Somebody else still samples from a checkpoint that was deleted since.
    samplers = [await stage.sessions.create(name, NewSession(), None) for name in ("ben", "cleo")]
    for version, sampler in zip((8, 9), samplers, strict=True):
        await stage.samplers.create_if_absent(
            SamplingSessionRecord(
                sampling_session_id=ids.sampling_session_id(sampler, 0),
                session_id=sampler,
                owner="ben",
                base_model=BASE,
                model_id=model_id,
                version=version,
            )
        )
    await stage.sessions.finish("cleo", samplers[1], "success", "")
    await stage.sessions.finish("ann", session_id, "success", "")
    await stage.sweep(later=SETTLED)
    await stage.sweep(later=DELETED)
    assert [request.snapshots for request in stage.trainer.deleted] == [False]
    await stage.sweep(later=SETTLED + 60)
    last = stage.trainer.deleted[-1]
    assert (last.snapshots, list(last.kept_versions)) == (True, [7, 8])
    assert await stage.redis.zcard(keys.ENDED_MODELS) == 0
    assert [record.version for record in await stage.checkpoints.of_model(model_id)] == [7]


async def test_a_model_that_comes_after_the_end_of_its_session_is_refused(stage: Stage) -> None:
    session_id = await stage.session()
    record = await stage.record(session_id)
    await stage.sessions.finish("ann", session_id, "success", "")
    with pytest.raises(Gone, match="was finished"):
        # The session was looked at before, the model made only now.
        await stage.model(record.session_id)
    assert await stage.store.models(session_id) == []


async def test_as_many_sessions_as_a_sweep_takes_that_cannot_be_parked_stop_no_other(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention_module, "_MOST_SESSIONS", 50)

    async def silent(session_id: str, seen: float) -> None:
        await stage.redis.hset(keys.session(session_id), "last_heartbeat", repr(seen))
        await stage.redis.zadd(keys.SESSION_LIFE, {session_id: seen})

    now = time.time()
    for number in range(50):
        session_id = await stage.session()
        model_id = ids.model_id(session_id, 0)
        await stage.redis.sadd(keys.session_models(session_id), model_id)
        create = operation_pb2.CreateModel(base_model="org/away")
        await stage.journal.accept(
            operation_pb2.Operation(model_id=model_id, seq_id=0, create_model=create), "ann"
        )
        await silent(session_id, now - 400 + number / 10)
    last = await stage.session()
    model_id = await stage.model(last)
    await silent(last, now - 150)
    await asyncio.sleep(0.1)
    for later in (0, 5, 6):
        assert stage.trainer.parked == []
        await stage.retention.sweep(now + later)
    assert stage.trainer.parked == [model_id]


async def test_a_trainer_that_hangs_keeps_no_sweep_from_the_models_of_others(
    stage: Stage, redis_client: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As many as hang are all that are looked at together.
    monkeypatch.setattr(retention_module, "_CONCURRENCY", 4)
    monkeypatch.setattr(retention_module, "_PATIENCE_S", 0.3)
    retention = stage.another("gateway-0")
    hung = ScriptedTrainer(stage.journal, {})
    async with serving(redis_client, hung, "trainer-1", base_model="org/hangs"):
        await stage.discovery.refresh()
        silent = [await stage.model(await stage.session(), "org/hangs") for _ in range(8)]
        hung.parking.clear()
        others = set()
        for later in (200, 400, 600):
            others.add(await stage.model(await stage.session()))
            await until(lambda: not others & stage.dispatcher._leading.keys())
            await retention.sweep(time.time() + later)
            await until(lambda: set(stage.trainer.parked) == others)
        assert hung.parked == []
        hung.parking.set()
        for later in (700, 800, 900):
            await until(lambda: not set(silent) & stage.dispatcher._leading.keys())
            await retention.sweep(time.time() + later)
        await until(lambda: sorted(hung.parked) == sorted(silent))
        await retention.stop()


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def test_what_fails_again_and_again_rests_longer_each_time() -> None:
    rest = longer(None, 100, 5, 300)
    assert rest.until == 100
    lengths = []
    for _ in range(8):
        rest = longer(rest, 100, 5, 300)
        lengths.append(rest.until - 100)
    assert lengths == [10, 20, 40, 80, 160, 300, 300, 300]


async def everything(client: redis.asyncio.Redis) -> set[str]:
    """Keys that do not go by themselves."""
    names = {raw.decode() for raw in await client.keys("*")}
    return {name for name in names if await client.ttl(name) == -1}


async def test_nothing_stays_of_a_session_that_ended_long_ago(stage: Stage) -> None:
    forgetting = Forgetting(stage.redis, stage.stores, "gateway-0", forget_after=1000)
    before = await everything(stage.redis)
    session_id = await stage.session()
    await stage.store.set_project(await stage.record(session_id), "p")
    model_id = await stage.model(session_id)
    await stage.accept(ids.model_id(session_id, 1), 0, refused=errors.to_pb(InvalidRequest("no")))
    await stage.redis.sadd(keys.session_models(session_id), ids.model_id(session_id, 1))
    for number in range(100):
        await stage.samplers.create_if_absent(
            SamplingSessionRecord(
                sampling_session_id=ids.sampling_session_id(session_id, number),
                session_id=session_id,
                owner="ann",
                base_model=BASE,
                model_id=model_id,
                version=number,
            )
        )
    await stage.sessions.finish("ann", session_id, "success", "")
    for later in (SETTLED, DELETED, SETTLED + 60):
        await stage.sweep(later=later)
    await forgetting.sweep(time.time() + 900)
    assert await stage.store.get(session_id) is not None
    await forgetting.sweep(time.time() + 1100)
    # Its owner goes with its count.
    await UsageStore(stage.redis).note_stored(time.time())
    counted = {keys.HELD_BYTES, keys.EXPIRING_BYTES, keys.WAITING_OPERATIONS}
    # What was accepted of late is listed for a minute.
    assert await everything(stage.redis) - before - counted <= {keys.PENDING_MODELS}
    assert await stage.redis.zrange(keys.OVER_SESSIONS, 0, -1) == []


async def test_what_a_kept_checkpoint_needs_stays_until_it_is_gone(stage: Stage) -> None:
    forgetting = Forgetting(stage.redis, stage.stores, "gateway-0", forget_after=1000)
    session_id = await stage.session()
    model_id = await stage.model(session_id)
    checkpoint = CheckpointRecord(
        model_id=model_id,
        checkpoint_id="weights/kept",
        owner="ann",
        kind="training",
        version=1,
        size_bytes=1,
        created_at=1.0,
        base_model=BASE,
        lora_rank=8,
    )
    await stage.checkpoints.put(checkpoint)
    await stage.sessions.finish("ann", session_id, "success", "")
    for later in (SETTLED, DELETED, SETTLED + 60):
        await stage.sweep(later=later)
    await forgetting.sweep(time.time() + 1100)
    assert await stage.models.get(model_id) is not None
    assert await stage.store.get(session_id) is not None
    await stage.checkpoints.remove(checkpoint)
    await forgetting.sweep(time.time() + 1200)
    assert await stage.models.get(model_id) is not None, "it is looked at again after as long, or a day"
    await forgetting.sweep(time.time() + 2200)
    assert await stage.models.get(model_id) is None
    assert await stage.store.get(session_id) is None


async def test_an_unloaded_model_loses_its_training_state_while_its_session_lives(stage: Stage) -> None:
    session_id = await stage.session()
    model_id = await stage.model(session_id)
    unloaded = await stage.run(model_id, 2, unload_model=operation_pb2.UnloadModel())
    assert unloaded.HasField("unload_model")
    await stage.sweep()
    assert model_id in stage.trainer.disk
    await stage.sweep(later=6)
    assert model_id not in stage.trainer.disk
    assert await stage.journal_keys(model_id) == {"meta"}
    assert (await stage.step(model_id, 3)).error.code == "model_unloaded"
    assert await stage.redis.zcard(keys.ENDED_MODELS) == 0
    # Sent again, it has the same result.
    assert (await stage.run(model_id, 2, unload_model=operation_pb2.UnloadModel())).HasField("unload_model")


async def test_a_trainer_that_is_away_is_waited_for(stage: Stage, redis_client: redis.asyncio.Redis) -> None:
    session_id = await stage.session()
    model_id = await stage.model(session_id)
    await Registry(redis_client).withdraw("trainer", "trainer-0")
    await stage.discovery.refresh()
    await stage.sessions.finish("ann", session_id, "success", "")
    await stage.sweep(later=SETTLED)
    assert await stage.journal.is_closed(model_id)
    assert await stage.journal.durable(model_id) is not None
    assert await stage.redis.zscore(keys.ENDED_MODELS, model_id) is not None


async def test_what_a_retired_base_model_left_is_deleted_without_a_trainer(
    stage: Stage, data: DataDir
) -> None:
    session_id = await stage.session()
    model_id = await stage.model(session_id)
    for directory in (data.state(model_id) / "1-1", data.snapshot(model_id, 1), data.snapshot(model_id, 2)):
        directory.mkdir(parents=True)
        (directory / "file").write_bytes(b"x")
    await stage.checkpoints.put(
        CheckpointRecord(
            model_id=model_id,
            checkpoint_id="sampler_weights/kept",
            owner="ann",
            kind="sampler",
            version=2,
            size_bytes=1,
            created_at=time.time(),
            base_model=BASE,
            lora_rank=8,
        )
    )
    await Registry(stage.redis).withdraw("trainer", "trainer-0")
    await known_models.retire(stage.redis, BASE)
    await stage.discovery.refresh()
    await stage.sweep(later=200)
    assert await stage.redis.zcard(keys.PARKED_SESSIONS) == 1, "there is no memory to free"
    await stage.sessions.finish("ann", session_id, "success", "")
    await stage.sweep(later=SETTLED)
    await stage.sweep(later=DELETED)
    assert not data.state(model_id).exists()
    assert await stage.journal_keys(model_id) == {"meta"}
    await stage.sweep(later=SETTLED + 60)
    assert [path.name for path in data.snapshots(model_id).iterdir()] == ["2"]
    assert await stage.redis.zcard(keys.ENDED_MODELS) == 0


async def test_only_one_gateway_sweeps_at_a_time(stage: Stage) -> None:
    other = stage.another("gateway-1")
    assert await stage.retention._lease.take()
    assert await stage.retention._lease.take()
    assert not await other._lease.take()
    await stage.redis.delete(keys.RETENTION_LEASE)
    assert await other._lease.take()


async def test_a_closed_model_stays_closed_and_an_open_one_is_never_erased(stage: Stage) -> None:
    session_id = await stage.session()
    model_id = await stage.model(session_id)
    assert not await stage.journal.erase(model_id)
    assert await stage.journal_keys(model_id) >= {"meta"}
    refused = errors.to_pb(InvalidRequest("no data"))
    assert (await stage.run(model_id, 2, refused=refused)).error.code == "invalid_request"
    await stage.step(model_id, 3)
    assert stage.trainer.order(model_id) == [0, 1, 3]
