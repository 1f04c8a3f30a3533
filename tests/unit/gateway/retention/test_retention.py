"""Silent sessions are parked and go on where they were, and no sweep is held up by what hangs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
import redis.asyncio

from services.common.contract import ids
from services.common.state import keys
from services.gateway.dispatch.leases import Lease
from services.gateway.retention import retention as retention_module
from services.gateway.retention.plan import longer
from tests.unit.gateway.retention.stage import Stage
from tests.unit.gateway.scripted_services import ScriptedTrainer, serving
from tinsmith.internal.v1 import operation_pb2
from tinsmith.v1 import training_pb2


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


async def test_a_sign_of_life_at_the_last_moment_keeps_the_session(stage: Stage) -> None:
    session_id = await stage.session()
    record = await stage.store.get(session_id)
    assert record is not None
    await stage.store.touch(session_id)
    assert not await stage.store.abandon(session_id, record.last_heartbeat)
    await stage.sessions.heartbeat("ann", session_id)


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
    async with asyncio.timeout(60):
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


async def test_only_one_gateway_sweeps_at_a_time(stage: Stage) -> None:
    other = stage.another("gateway-1")
    assert await stage.retention._lease.take()
    assert await stage.retention._lease.take()
    assert not await other._lease.take()
    await stage.redis.delete(keys.RETENTION_LEASE)
    assert await other._lease.take()


async def test_however_many_sessions_are_silent_no_reply_is_large(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a sweep reads in one piece, it parses in one step of the event loop."""
    now, largest = time.time(), 0
    parked = {f"parked-{number}": now - 500 - number / 100 for number in range(3000)}
    await stage.redis.zadd(keys.SESSION_LIFE, parked)
    await stage.redis.zadd(keys.PARKED_SESSIONS, parked)
    await stage.redis.zadd(keys.ENDED_MODELS, {f"s-{number}:train:0": now for number in range(600)})
    session_id = await stage.session()
    samplers = {ids.sampling_session_id(session_id, number) for number in range(3000)}
    await stage.redis.sadd(keys.session_samplers(session_id), *samplers)
    execute = stage.redis.execute_command

    async def measured(*args: object, **options: object) -> object:
        nonlocal largest
        reply = await execute(*args, **options)
        if isinstance(reply, list | set | tuple):
            parts = [part for part in (reply, *reply) if isinstance(part, list | set)]
            largest = max(largest, *map(len, parts), 0)
        return reply

    monkeypatch.setattr(stage.redis, "execute_command", measured)
    await stage.sweep(later=200)
    # The last one is due, behind all that are parked.
    assert stage.cancelled == [session_id]
    assert await stage.redis.zscore(keys.PARKED_SESSIONS, session_id) is not None
    assert set(await stage.samplers.of_session(session_id)) == samplers
    assert 0 < largest <= 1000
