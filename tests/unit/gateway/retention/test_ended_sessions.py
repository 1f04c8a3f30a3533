"""What is over is taken down step by step, after what was accepted is done; what is still needed stays."""

from __future__ import annotations

import time

import pytest
import redis.asyncio

from services.common.contract import errors, ids
from services.common.contract.errors import Gone, InvalidRequest
from services.common.state import keys, known_models
from services.common.state.registry import Registry
from services.common.storage.data_dir import DataDir
from services.gateway.records.checkpoint import CheckpointRecord
from services.gateway.records.sampling_session import SamplingSessionRecord
from services.gateway.records.usage import UsageStore
from services.gateway.retention.forget import Forgetting
from services.gateway.sessions.sessions import NewSession
from tests.unit.gateway.retention.stage import DELETED, SETTLED, Stage
from tests.unit.gateway.scripted_services import BASE
from tinsmith.internal.v1 import operation_pb2
from tinsmith.v1 import training_pb2


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
    # Nothing is counted but the results, which expire by themselves.
    names = [name async for name in stage.redis.scan_iter(f"{keys.PREFIX}:future:*")]
    results = [len(await stage.redis.hget(name, "result") or b"") + 512 for name in names]
    assert int(await stage.redis.hget(keys.HELD_BYTES, "ann") or 0) == sum(results)
    assert int(await stage.redis.hget(keys.HELD_BYTES, "*results") or 0) == sum(results)
    assert await stage.redis.hget(keys.HELD_BYTES, "*journals") is None


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


async def test_a_closed_model_stays_closed_and_an_open_one_is_never_erased(stage: Stage) -> None:
    session_id = await stage.session()
    model_id = await stage.model(session_id)
    assert not await stage.journal.erase(model_id)
    assert await stage.journal_keys(model_id) >= {"meta"}
    refused = errors.to_pb(InvalidRequest("no data"))
    assert (await stage.run(model_id, 2, refused=refused)).error.code == "invalid_request"
    await stage.step(model_id, 3)
    assert stage.trainer.order(model_id) == [0, 1, 3]


async def test_models_that_ended_together_are_taken_down_together(stage: Stage) -> None:
    sessions = [await stage.session() for _ in range(20)]
    models = [await stage.model(session_id) for session_id in sessions]
    for session_id in sessions:
        await stage.sessions.finish("ann", session_id, "success", "")
    await stage.sweep(later=SETTLED)
    await stage.sweep(later=DELETED)
    # A trainer is called for a few at a time; the others have their turn in the same sweep.
    assert {request.model_id for request in stage.trainer.deleted} == set(models)
