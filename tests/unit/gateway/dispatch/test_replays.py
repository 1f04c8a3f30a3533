"""What a trainer that was gone repeats, and what becomes of a model of which something cannot be repeated."""

from __future__ import annotations

import asyncio

import pytest
import redis.asyncio
from prometheus_client import REGISTRY

from services.common.contract import ids
from services.common.contract.errors import DataLoss, Internal, InvalidRequest, NotFound, TinsmithError
from services.common.state import keys
from services.common.telemetry import repeats
from services.gateway.dispatch import plan
from services.gateway.records.session import SessionRecord
from services.gateway.records.stores import Stores
from tests.unit.gateway.dispatching import (
    MODEL,
    SETTINGS,
    Gateway,
    GatewayFactory,
    again,
    batch,
    create,
    load,
    started,
    step,
)
from tests.unit.gateway.scripted_services import ScriptedTrainer, serving
from tinsmith.internal.v1 import operation_pb2


async def died_after(
    redis_client: redis.asyncio.Redis,
    gateway: Gateway,
    trainer: ScriptedTrainer,
    *operations: operation_pb2.Operation,
) -> ScriptedTrainer:
    """The next start of a trainer that died when it had executed these, from the first one of the model."""
    async with serving(redis_client, trainer, "trainer-0") as first:
        await gateway.accept(*operations)
        await gateway.result(len(operations) - 1)
        await first.kill()
    return again(trainer)


async def waits(gateway: Gateway, seq_id: int, reason: str) -> None:
    """An operation of the model comes to wait for this reason. While it is being tried there is none."""
    told = ""
    async with asyncio.timeout(60):
        while reason not in told:
            await asyncio.sleep(0.01)
            view = await gateway.futures.wait(ids.request_id(MODEL, seq_id), 0)
            assert view.state == "pending"
            told = view.queue_state_reason or ""


async def tried(trainer: ScriptedTrainer, seq_id: int, times: int) -> None:
    """A start of a trainer comes to have executed an operation so often."""
    async with asyncio.timeout(60):
        while trainer.order(MODEL).count(seq_id) < times:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def counted(what: str) -> float:
    return REGISTRY.get_sample_value(f"tinsmith_models_{what}_total") or 0.0


async def session_of_the_model(redis_client: redis.asyncio.Redis) -> None:
    record = SessionRecord(session_id="s", owner="ann", created_at=1.0, last_heartbeat=1.0)
    await Stores.over(redis_client).sessions.create(record)


async def test_a_step_is_not_answered_before_the_failure_of_a_batch_that_it_passed_over_is_written_down(
    redis_client: redis.asyncio.Redis, gateway: Gateway, trainer: ScriptedTrainer
) -> None:
    trainer.fail[1] = Internal("out of memory", "out_of_memory")
    trainer.durable_steps = False
    gateway.held[1] = asyncio.Event()
    async with serving(redis_client, trainer, "trainer-0") as first:
        # Else what overtakes the creation on its way is sent again, and that waits for what is held.
        await gateway.accept(create())
        await gateway.result(0)
        await gateway.accept(batch(1), step(2), batch(3))
        await gateway.result(3)
        view = await gateway.futures.wait(ids.request_id(MODEL, 2), 0.2)
        assert view.state == "pending", "a replay might still find that the batch succeeds"
        gateway.held[1].set()
        assert (await gateway.result(1)).HasField("error")
        assert (await gateway.result(2)).optim_step.metrics["steps"] == 2
        await first.kill()
    # A trainer that could do the batch is not asked to: it passes over what is failed.
    restarted = again(trainer)
    async with serving(redis_client, restarted, "trainer-0"):
        await gateway.accept(step(4))
        await gateway.result(4)
    assert restarted.order(MODEL) == [0, 2, 3, 4]


async def test_a_batch_that_fails_in_a_replay_is_repeated_from_the_snapshot_before_anything_builds_on_it(
    redis_client: redis.asyncio.Redis, gateway: Gateway, trainer: ScriptedTrainer
) -> None:
    trainer.durable_steps = False
    restarted = await died_after(redis_client, gateway, trainer, create(), batch(1), step(2))
    restarted.durable_steps = False
    restarted.fail[1] = Internal("out of memory", "out_of_memory")
    async with serving(redis_client, restarted, "trainer-0"):
        await gateway.accept(step(3))
        while len(restarted.dropped) < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert 2 not in restarted.order(MODEL) and 3 not in restarted.order(MODEL)
        await waits(gateway, 3, "operation 1 cannot be repeated at present (out of memory)")
        del restarted.fail[1]
        assert (await gateway.result(3, 30)).optim_step.metrics["steps"] == 4
    assert restarted.models[MODEL].effects == [0, 1, 2, 3]


async def test_an_operation_whose_result_was_lost_is_repeated_by_a_replay(
    redis_client: redis.asyncio.Redis, gateway: Gateway, trainer: ScriptedTrainer
) -> None:
    trainer.durable_steps = False
    trainer.raises[1] = Internal("executed, but its result is no longer kept", "result_lost")
    async with serving(redis_client, trainer, "trainer-0") as first:
        await gateway.accept(create(), batch(1))
        assert (await gateway.result(1)).error.code == "result_lost"
        await first.kill()
    restarted = again(trainer)
    async with serving(redis_client, restarted, "trainer-0"):
        await gateway.accept(step(2))
        await gateway.result(2)
    assert restarted.order(MODEL) == [0, 1, 2]


async def test_a_replay_goes_on_past_batches_whose_results_the_trainer_no_longer_keeps(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory, trainer: ScriptedTrainer
) -> None:
    trainer.durable_steps = False
    async with serving(redis_client, trainer, "trainer-0"):
        async with started(redis_client, "gateway-0", SETTINGS, 6.0) as first:
            await first.accept(create(), batch(1), step(2))
            await first.result(2)
        trainer.raises[1] = Internal("executed, but its result is no longer kept", "result_lost")
        second = await gateway_on("gateway-1")
        await second.accept(step(3))
        assert (await second.result(3)).optim_step.metrics["steps"] == 4
    assert trainer.order(MODEL) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "code", ["adapters_in_use", "full_models_in_use", "out_of_memory", "internal", "storage_full"]
)
async def test_a_creation_that_finds_no_room_in_a_replay_is_repeated_until_it_does(
    redis_client: redis.asyncio.Redis, gateway: Gateway, trainer: ScriptedTrainer, code: str
) -> None:
    restarted = await died_after(redis_client, gateway, trainer, create(), batch(1))
    restarted.fail[0] = Internal("there is no room", code)
    async with serving(redis_client, restarted, "trainer-0"):
        await gateway.accept(step(2))
        await tried(restarted, 0, 5)
        await waits(gateway, 2, "operation 0 cannot be repeated at present (there is no room)")
        del restarted.fail[0]
        assert (await gateway.result(2, 30)).optim_step.metrics["steps"] == 3


async def test_nothing_is_made_of_a_model_without_a_step_that_cannot_be_repeated_at_present(
    redis_client: redis.asyncio.Redis, gateway: Gateway, trainer: ScriptedTrainer
) -> None:
    trainer.durable_steps = False
    restarted = await died_after(
        redis_client, gateway, trainer, create(), batch(1), step(2), batch(3), step(4)
    )
    restarted.fail[2] = Internal("the trainer died 3 times", "crashed_trainer")
    async with serving(redis_client, restarted, "trainer-0"):
        await gateway.accept(batch(5), step(6))
        await tried(restarted, 2, 5)
        assert not {4, 6} & set(restarted.order(MODEL)), "a step would make the wrong state durable"
        # Not answered: a batch would be told the numbers of other weights.
        await waits(gateway, 5, "it tries once more after an hour")
        del restarted.fail[2]
        assert (await gateway.result(6, 30)).optim_step.metrics["steps"] == 7
    assert restarted.models[MODEL].effects == [0, 1, 2, 3, 4, 5, 6]


async def test_a_load_whose_checkpoint_is_away_in_a_replay_is_repeated_until_it_is_back(
    redis_client: redis.asyncio.Redis, gateway: Gateway, trainer: ScriptedTrainer
) -> None:
    restarted = await died_after(redis_client, gateway, trainer, create(), load(1))
    restarted.fail[1] = NotFound("checkpoint best does not exist", "checkpoint_not_found")
    async with serving(redis_client, restarted, "trainer-0"):
        await gateway.accept(step(2))
        await tried(restarted, 1, 5)
        await waits(gateway, 2, "operation 1 cannot be repeated at present (checkpoint best does not exist)")
        del restarted.fail[1]
        assert (await gateway.result(2, 30)).optim_step.metrics["steps"] == 3


@pytest.mark.parametrize(
    "error",
    [
        DataLoss("what it loads is damaged"),
        NotFound("what it loads is damaged", "checkpoint_not_found"),
        InvalidRequest("what it loads is damaged", "state_mismatch"),
    ],
    ids=lambda error: error.code,
)
async def test_a_model_of_which_an_operation_is_refused_for_long_is_lost(
    redis_client: redis.asyncio.Redis,
    gateway: Gateway,
    trainer: ScriptedTrainer,
    monkeypatch: pytest.MonkeyPatch,
    error: TinsmithError,
) -> None:
    monkeypatch.setattr(plan, "REFUSED_S", 0.5)
    tries, lost = counted("tried_in_vain"), counted("lost")
    restarted = await died_after(redis_client, gateway, trainer, create(), load(1))
    restarted.fail[1] = error
    async with serving(redis_client, restarted, "trainer-0"):
        await gateway.accept(step(2))
        told = (await gateway.result(2)).error
        assert told.code == "model_lost" and "what it loads is damaged" in told.message
        assert 2 in gateway.recorded, "a save would keep its part of what its owner may have"
    # Pauses of 0.1, 0.2 and 0.4 s.
    assert restarted.order(MODEL).count(1) == 4
    assert (counted("tried_in_vain") - tries, counted("lost") - lost) == (4, 1)


async def test_a_model_whose_session_is_over_is_given_up_after_all_that_gateways_have_tried_together(
    redis_client: redis.asyncio.Redis, trainer: ScriptedTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await session_of_the_model(redis_client)
    async with started(redis_client, "gateway-0", SETTINGS, 6.0) as first:
        restarted = await died_after(redis_client, first, trainer, create(), batch(1))
        restarted.fail[1] = Internal("there is no room", "adapters_in_use")
        async with serving(redis_client, restarted, "trainer-0"):
            monkeypatch.setattr(plan, "IN_VAIN_S", 0.0)
            await first.accept(step(2))
            await tried(restarted, 1, 4)
            await waits(first, 2, "operation 1 cannot be repeated at present")
    meta = await redis_client.hgetall(keys.journal_meta(MODEL))
    waited = int(meta[b"vain_ms"])
    assert waited >= 300 and b"refused_ms" not in meta
    monkeypatch.setattr(plan, "IN_VAIN_S", waited / 1000)
    await Stores.over(redis_client).sessions.finish("s", "success", "")
    third = again(restarted)
    third.fail = restarted.fail
    async with (
        serving(redis_client, third, "trainer-0"),
        started(redis_client, "gateway-1", SETTINGS, 6.0) as second,
    ):
        assert (await second.result(2)).error.code == "model_lost"
    assert third.order(MODEL).count(1) == 1


async def test_a_model_that_its_trainer_never_brings_back_is_given_up_once_its_session_is_over(
    redis_client: redis.asyncio.Redis,
    gateway: Gateway,
    trainer: ScriptedTrainer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan, "IN_VAIN_S", 0.0)
    await session_of_the_model(redis_client)
    restarted = await died_after(redis_client, gateway, trainer, create(), step(1))
    restarted.cannot_restore = Internal("it is on another volume", "other_volume")
    async with serving(redis_client, restarted, "trainer-0"):
        await gateway.accept(step(2))
        await waits(gateway, 2, "it is on another volume")
        await Stores.over(redis_client).sessions.finish("s", "success", "")
        told = (await gateway.result(2)).error
        assert told.code == "model_lost" and "it is on another volume" in told.message


async def test_a_model_whose_snapshot_is_not_found_for_a_moment_comes_back(
    redis_client: redis.asyncio.Redis, gateway: Gateway, trainer: ScriptedTrainer
) -> None:
    restarted = await died_after(redis_client, gateway, trainer, create(), step(1))
    restarted.cannot_restore = DataLoss("the snapshot is missing")
    async with serving(redis_client, restarted, "trainer-0"):
        await gateway.accept(step(2))
        await waits(
            gateway, 2, "the trainer cannot bring the model back at present (the snapshot is missing)"
        )
        restarted.cannot_restore = None
        assert (await gateway.result(2, 30)).optim_step.metrics["steps"] == 3


@pytest.mark.parametrize(
    ("error", "grows"),
    [(InvalidRequest("of another shape", "state_mismatch"), True), (Internal("no memory"), False)],
    ids=lambda value: str(value),
)
async def test_a_trainer_that_refuses_a_snapshot_is_asked_less_and_less_and_the_client_knows_why_all_the_time(
    redis_client: redis.asyncio.Redis,
    gateway: Gateway,
    trainer: ScriptedTrainer,
    error: TinsmithError,
    grows: bool,
) -> None:
    restarted = await died_after(redis_client, gateway, trainer, create(), step(1))
    restarted.cannot_restore = error
    async with serving(redis_client, restarted, "trainer-0"):
        await gateway.accept(step(2))
        async with asyncio.timeout(60):
            while restarted.restores < 20:
                # As when the pause is over, which grows to minutes.
                for runner in gateway.dispatcher._runners.values():
                    runner._not_before = 0.0
                    runner.wake()
                await asyncio.sleep(0.01)
        # The reason is kept for the pause and half a minute.
        told_for = await redis_client.ttl(keys.queue_state(MODEL))
        assert told_for > plan.LONGEST_PAUSE_S if grows else 0 < told_for < 40


async def test_a_model_that_its_trainer_cannot_bring_back_waits_and_says_why(
    redis_client: redis.asyncio.Redis, gateway: Gateway, trainer: ScriptedTrainer
) -> None:
    restarted = await died_after(redis_client, gateway, trainer, create(), step(1))
    restarted.cannot_restore = Internal("no memory for 5 GiB", "out_of_memory")
    async with serving(redis_client, restarted, "trainer-0"):
        await gateway.accept(step(2))
        await waits(gateway, 2, "the trainer cannot bring the model back at present (no memory for 5 GiB)")
        restarted.cannot_restore = None
        assert (await gateway.result(2, 30)).optim_step.metrics["steps"] == 3


async def test_models_that_one_cause_keeps_away_are_told_of_together(
    redis_client: redis.asyncio.Redis,
    gateway: Gateway,
    trainer: ScriptedTrainer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(repeats, "_MOST_NAMES", 1)
    models = [ids.model_id("s", number) for number in range(3)]
    async with serving(redis_client, trainer, "trainer-0") as first:
        for model_id in models:
            made = create()
            made.model_id = model_id
            await gateway.accept(made)
            assert (await gateway.futures.wait(ids.request_id(model_id, 0), 60)).state == "done"
        await first.kill()
    restarted = again(trainer)
    restarted.cannot_restore = Internal("no memory for 5 GiB", "out_of_memory")
    async with serving(redis_client, restarted, "trainer-0"):
        for model_id in models:
            stepped = step(1)
            stepped.model_id = model_id
            await gateway.accept(stepped)
        runners = gateway.dispatcher._runners
        async with asyncio.timeout(60):
            while not all(one in runners and runners[one]._attempt > 2 for one in models):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    said = [one.split(": ")[1] for one in caplog.messages if one.startswith("a model is not back yet: s:")]
    assert len(set(said)) == 1, "the others are counted: of more names than are kept there is only that line"


async def test_however_often_a_model_is_not_brought_back_the_log_has_the_first_time_and_the_end(
    redis_client: redis.asyncio.Redis,
    gateway: Gateway,
    trainer: ScriptedTrainer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    restarted = await died_after(redis_client, gateway, trainer, create(), step(1))
    restarted.cannot_restore = Internal("no memory for 5 GiB", "out_of_memory")
    async with serving(redis_client, restarted, "trainer-0"):
        await gateway.accept(step(2))
        await waits(gateway, 2, "(no memory for 5 GiB)")
        runner = gateway.dispatcher._runners[MODEL]
        tries = runner._attempt + 3
        async with asyncio.timeout(60):
            while runner._attempt < tries:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        restarted.cannot_restore = None
        await gateway.result(2, 30)
    said = [one for one in caplog.messages if one.startswith("a model is not back yet")]
    assert said.count(f"a model is not back yet: {MODEL}: no memory for 5 GiB") == 1
    assert f"no more of {MODEL}, after" in said[-1]
