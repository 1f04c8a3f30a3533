"""Memory of what is under way to trainers: bounded over all models, in turns, and nobody waits for ever."""

from __future__ import annotations

import asyncio

import redis.asyncio

from services.common.contract import ids
from services.common.state.journal import Journal
from services.gateway.dispatch.leases import TTL_S
from services.gateway.dispatch.plan import Allowance
from services.gateway.dispatch.send_room import COPIES, SendRoom
from tests.unit.gateway.dispatching import SETTINGS, Gateway, batch, create, started
from tests.unit.gateway.scripted_services import ScriptedTrainer, serving
from tinsmith.internal.v1 import operation_pb2
from tinsmith.v1 import results_pb2


def room(payload: int) -> SendRoom:
    return SendRoom(COPIES * payload)


def test_a_trainer_is_sent_what_is_left_for_others_and_always_one_operation() -> None:
    found = room(100)
    assert found.allowance("a", "m1") == Allowance(50, True)
    found.take("a", 40)
    assert found.allowance("a", "m1") == Allowance(10, False)
    assert found.allowance("b", "m2") == Allowance(30, True)
    found.take("b", 500)
    assert found.allowance("a", "m1") == Allowance(0, False)
    assert found.allowance("c", "m3") == Allowance(0, True)
    found.give("b", 500)
    found.give("a", 40)
    assert found.free == COPIES * 100


def test_models_of_a_trainer_take_turns_in_the_order_in_which_they_came() -> None:
    found, woken = room(100), []
    found.take("a", 50)
    for name in ("m1", "m2"):
        found.await_turn("a", name, lambda name=name: woken.append(name))
    found.await_turn("a", "m1", lambda: woken.append("m1"))
    found.give("a", 50)
    assert woken == ["m1"]
    assert found.allowance("a", "m2") == Allowance(0, False)
    assert found.allowance("b", "m3").nbytes > 0
    assert found.allowance("a", "m1") == Allowance(50, True)
    found.take("a", 50)
    found.leave("a", "m1")
    assert woken == ["m1", "m2"]
    found.leave("a", "m2")
    found.leave("a", "m2")
    found.give("a", 50)
    assert woken == ["m1", "m2"]
    assert found.allowance("a", "m9") == Allowance(50, True)


def test_who_waits_hears_of_room_that_another_trainer_gave_back() -> None:
    found, woken = room(100), []
    found.take("b", 90)
    found.take("a", 5)
    found.await_turn("a", "m1", lambda: woken.append("m1"))
    found.give("b", 90)
    assert woken == ["m1"]


async def test_many_models_with_large_batches_are_sent_no_more_at_once_than_memory_takes(
    redis_client: redis.asyncio.Redis, trainer: ScriptedTrainer
) -> None:
    size, models = 100_000, [ids.model_id("s", number) for number in range(12)]

    def large(model_id: str, seq_id: int) -> operation_pb2.Operation:
        operation = batch(seq_id)
        operation.model_id = model_id
        operation.forward_backward.loss_fn = "x" * size
        return operation

    memory = COPIES * 5 * size
    async with (
        serving(redis_client, trainer, "trainer-0"),
        started(redis_client, "gateway-0", SETTINGS, TTL_S, memory) as gateway,
    ):
        for model_id in models:
            made = create()
            made.model_id = model_id
            await gateway.accept(made)
        await asyncio.gather(*(result_of(gateway, model_id, 0) for model_id in models))
        trainer.gate.clear()
        trainer.calls = 0
        for seq_id in (1, 2, 3):
            await gateway.accept(*(large(model_id, seq_id) for model_id in models))
        async with asyncio.timeout(60):
            while trainer.calls < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await asyncio.sleep(1)
        # For one trainer half of the memory, as there may be another.
        assert trainer.calls == 2
        assert gateway.dispatcher._room.free >= memory // 2
        trainer.gate.set()
        await asyncio.gather(*(result_of(gateway, model_id, 3) for model_id in models))
        assert all(trainer.order(model_id) == [0, 1, 2, 3] for model_id in models)
        assert gateway.dispatcher._room.free == memory


async def test_models_of_another_base_model_do_not_wait_for_a_trainer_that_hangs(
    redis_client: redis.asyncio.Redis, trainer: ScriptedTrainer
) -> None:
    other = ScriptedTrainer(Journal(redis_client), {})
    async with (
        serving(redis_client, trainer, "trainer-0"),
        serving(redis_client, other, "trainer-1", base_model="org/other"),
        started(redis_client, "gateway-0", SETTINGS, TTL_S, memory=1) as gateway,
    ):
        trainer.gate.clear()
        await gateway.accept(create())
        made = create()
        made.model_id, made.create_model.base_model = ids.model_id("s", 1), "org/other"
        await gateway.accept(made)
        assert (await result_of(gateway, made.model_id, 0)).HasField("create_model")
        trainer.gate.set()
        await gateway.result(0)


async def result_of(gateway: Gateway, model_id: str, seq_id: int) -> results_pb2.OperationResult:
    view = await gateway.futures.wait(ids.request_id(model_id, seq_id), 20)
    assert view.state == "done", f"{model_id}:{seq_id} is {view.state}: {view.queue_state_reason}"
    return results_pb2.OperationResult.FromString(view.result or b"")
