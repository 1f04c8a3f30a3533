"""Who dispatches a model when gateways come and go, and what a trainer that was gone is told."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import redis.asyncio

from services.common.contract import ids
from services.gateway.dispatch import dispatcher as dispatcher_module
from services.gateway.dispatch import model_runner, plan
from services.gateway.dispatch.leases import Lease, Leases
from services.gateway.dispatch.plan import DispatchSettings
from services.gateway.records.session import SessionRecord
from services.gateway.records.stores import Stores
from tests.unit.gateway.dispatching import (
    MODEL,
    SETTINGS,
    GatewayFactory,
    again,
    batch,
    create,
    started,
    step,
)
from tests.unit.gateway.scripted_services import BASE, ScriptedTrainer, serving
from tinsmith.v1 import types_pb2


async def test_a_gateway_that_stops_hands_its_models_to_another(
    redis_client: redis.asyncio.Redis,
    gateway_on: GatewayFactory,
    trainer: ScriptedTrainer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatcher_module, "_SWEEP_S", 0.1)
    async with serving(redis_client, trainer, "trainer-0"):
        other = await gateway_on("gateway-1")
        async with started(redis_client, "gateway-0", SETTINGS, 6.0) as leader:
            await leader.accept(create())
            await leader.result(0)
            trainer.gate.clear()
            await leader.accept(batch(1), step(2))
            await asyncio.sleep(0.1)
        trainer.gate.set()
        await other.result(1, within=60)
        assert (await other.result(2, within=60)).HasField("optim_step")
        assert trainer.order(MODEL) == [0, 1, 2]
        assert sorted(other.recorded) == [1, 2]


async def test_a_gateway_that_dies_loses_its_models_when_its_lease_ends(
    redis_client: redis.asyncio.Redis,
    gateway_on: GatewayFactory,
    trainer: ScriptedTrainer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatcher_module, "_SWEEP_S", 0.1)
    async with serving(redis_client, trainer, "trainer-0"):
        dying = await gateway_on("gateway-0", ttl=1.0)
        await dying.accept(create())
        await dying.result(0)
        trainer.gate.clear()
        await dying.accept(batch(1), step(2))
        await asyncio.sleep(0.1)
        # Nothing of it goes on: neither its calls nor the renewal of its lease, which stays behind.
        monkeypatch.setattr(dying.dispatcher._leases, "release", _nothing)
        for task in dying.dispatcher._leading.values():
            task.cancel()
        dying.dispatcher._running = False
        await dying.dispatcher._leases._renewals.stop()
        await dying.dispatcher._sweeps.stop()
        other = await gateway_on("gateway-1", ttl=1.0)
        await other.accept(batch(3))
        trainer.gate.set()
        assert (await other.result(3, within=60)).HasField("forward_backward")
        assert trainer.order(MODEL) == [0, 1, 2, 3]
        await asyncio.gather(other.result(1), other.result(2))
        assert sorted(other.recorded) == [1, 2, 3]


async def _nothing(lease: object) -> None:
    return None


async def test_a_restarted_trainer_is_restored_and_replayed_and_no_result_is_published_again(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory, trainer: ScriptedTrainer
) -> None:
    gateway = await gateway_on()
    async with serving(redis_client, trainer, "trainer-0"):
        await gateway.accept(create(), batch(1), step(2), batch(3), batch(4, forward_only=True), batch(5))
        await gateway.result(5)
        before = [await gateway.result(seq_id) for seq_id in range(6)]
    await gateway.accept(step(6))
    view = await gateway.futures.wait(ids.request_id(MODEL, 6), 0.5)
    assert view.queue_state == "paused_capacity"
    assert view.queue_state_reason is not None
    assert BASE in view.queue_state_reason
    restarted = again(trainer)
    async with serving(redis_client, restarted, "trainer-0"):
        assert (await gateway.result(6)).optim_step.metrics["steps"] == 6
    assert restarted.restored == [MODEL]
    assert restarted.order(MODEL) == [3, 5, 6], "only what took effect after the durable snapshot runs again"
    assert restarted.models[MODEL].effects == [0, 1, 2, 3, 5, 6]
    assert [await gateway.result(seq_id) for seq_id in range(6)] == before
    assert sorted(gateway.recorded) == [0, 1, 2, 3, 4, 5, 6]


async def test_the_models_of_a_gateway_that_died_are_asked_for_a_few_at_a_time(
    redis_client: redis.asyncio.Redis,
    gateway_on: GatewayFactory,
    trainer: ScriptedTrainer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatcher_module, "_ACQUIRING", 4)
    models = [ids.model_id("s", number) for number in range(100)]
    for model_id in models:
        operation = create()
        operation.model_id = model_id
        await trainer._journal.accept(operation, "ann")
    at_once = most_at_once = 0
    acquire = Leases.acquire

    async def counted(self: Leases, *args: Any) -> Lease | float | None:
        nonlocal at_once, most_at_once
        at_once += 1
        most_at_once = max(most_at_once, at_once)
        try:
            return await acquire(self, *args)
        finally:
            at_once -= 1

    monkeypatch.setattr(Leases, "acquire", counted)
    async with serving(redis_client, trainer, "trainer-0"):
        gateways = [await gateway_on(f"gateway-{number}") for number in range(2)]
        for model_id in models:
            assert (await gateways[0].futures.wait(ids.request_id(model_id, 0), 20)).state == "done"
    assert most_at_once <= 2 * 4
    assert sorted(model_id for model_id, _ in trainer.executed) == sorted(models)


async def test_a_trainer_that_was_left_for_another_moves_no_pointer_any_more(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory, trainer: ScriptedTrainer
) -> None:
    gateway = await gateway_on(settings=replace(SETTINGS, trainer_patience=0.2))
    async with serving(redis_client, trainer, "trainer-0"):
        await gateway.accept(create(), step(1), batch(2))
        await gateway.result(2)
    another = again(trainer)
    async with serving(redis_client, another, "trainer-1"):
        await gateway.accept(batch(3))
        await gateway.result(3)
        # Cut off and alive: it made more of the model than was ever asked of the other.
        seen = trainer.epochs[MODEL]
        assert not await gateway.journal.mark_durable(MODEL, seen, 9, "9-0")
        # What it has can be told from the model.
        assert seen < (await gateway.journal.index(MODEL, -1)).moved
        await gateway.accept(step(4))
        await gateway.result(4)
    assert another.order(MODEL) == [2, 3, 4]
    assert (await gateway.journal.durable(MODEL)) == (4, "4")


async def test_a_trainer_that_dies_during_an_operation_runs_it_after_its_restart(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory, trainer: ScriptedTrainer
) -> None:
    gateway = await gateway_on()
    async with serving(redis_client, trainer, "trainer-0") as first:
        await gateway.accept(create())
        await gateway.result(0)
        trainer.gate.clear()
        await gateway.accept(batch(1), step(2))
        await asyncio.sleep(0.1)
        await first.kill()
    restarted = again(trainer)
    async with serving(redis_client, restarted, "trainer-0"):
        assert (await gateway.result(2)).HasField("optim_step")
        await gateway.result(1)
    assert restarted.order(MODEL) == [0, 1, 2], "without a durable snapshot everything runs again"
    assert sorted(gateway.recorded) == [0, 1, 2]


async def test_a_new_leader_brings_a_restarted_trainer_to_where_the_model_was(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory, trainer: ScriptedTrainer
) -> None:
    async with (
        started(redis_client, "gateway-0", SETTINGS, 6.0) as first,
        serving(redis_client, trainer, "trainer-0"),
    ):
        await first.accept(create(), step(1), batch(2))
        await first.result(2)
    second = await gateway_on("gateway-1")
    restarted = again(trainer)
    async with serving(redis_client, restarted, "trainer-0"):
        await second.accept(step(3))
        await second.result(3)
    assert restarted.models[MODEL].effects == [0, 1, 2, 3]
    assert second.recorded == [3]


async def test_a_gap_keeps_its_age_when_another_gateway_takes_over(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory, trainer: ScriptedTrainer
) -> None:
    async with serving(redis_client, trainer, "trainer-0"):
        async with started(redis_client, "gateway-0", SETTINGS, 6.0) as first:
            await first.accept(create(), step(3))
            assert (await first.futures.wait(ids.request_id(MODEL, 3), 1.0)).state == "pending"
        # The whole time of this gateway would be too long for the test.
        second = await gateway_on("gateway-1", settings=DispatchSettings(gap_timeout=1.0, trainer_poll=0.2))
        second.dispatcher.wake(MODEL)
        asked = asyncio.get_running_loop().time()
        assert (await second.result(3)).HasField("optim_step")
        assert asyncio.get_running_loop().time() - asked < 0.7


async def test_the_lease_on_a_model_of_a_finished_session_is_given_back_early(
    redis_client: redis.asyncio.Redis,
    gateway_on: GatewayFactory,
    trainer: ScriptedTrainer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_runner, "_IDLE_CHECK_S", 0.1)
    sessions = Stores.over(redis_client).sessions
    await sessions.create(SessionRecord(session_id="s", owner="ann", created_at=1.0, last_heartbeat=1.0))
    async with serving(redis_client, trainer, "trainer-0"):
        gateway = await gateway_on()
        await gateway.accept(create())
        await gateway.result(0)
        await asyncio.sleep(0.3)
        assert gateway.dispatcher._leading
        await sessions.finish("s", "success", "")
        for _ in range(1500):
            if not gateway.dispatcher._leading:
                break
            await asyncio.sleep(0.02)
        assert not gateway.dispatcher._leading


async def test_a_lost_state_fails_the_model_instead_of_hanging(
    redis_client: redis.asyncio.Redis,
    gateway_on: GatewayFactory,
    trainer: ScriptedTrainer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan, "REFUSED_S", 0.5)
    gateway = await gateway_on()
    async with serving(redis_client, trainer, "trainer-0"):
        await gateway.accept(create(), step(1))
        await gateway.result(1)
    trainer.disk.clear()
    async with serving(redis_client, again(trainer), "trainer-0"):
        await gateway.accept(batch(2), step(3))
        for seq_id in (2, 3):
            error = (await gateway.result(seq_id)).error
            assert (error.category, error.code) == (types_pb2.ERROR_CATEGORY_SERVER, "model_lost")


async def test_an_idle_model_is_let_go_and_led_again_when_there_is_work(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory, trainer: ScriptedTrainer
) -> None:
    async with serving(redis_client, trainer, "trainer-0"):
        gateway = await gateway_on(settings=DispatchSettings(idle_release=0.05))
        await gateway.accept(create())
        await gateway.result(0)
        for _ in range(1500):
            await asyncio.sleep(0.02)
            if not gateway.dispatcher._leading:
                break
        assert not gateway.dispatcher._leading
        other = await gateway_on("gateway-1")
        await other.accept(step(1))
        await other.result(1)
        assert other.recorded == [1]
