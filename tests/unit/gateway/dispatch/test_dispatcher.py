"""Which operations are dispatched, in which order, and what becomes of those that fail."""

from __future__ import annotations

import asyncio

import pytest
import redis.asyncio

from services.common.contract import ids
from services.common.contract.errors import Internal, InvalidRequest
from services.common.state import keys, known_models
from services.common.state.journal import Journal
from tests.unit.gateway.dispatching import MODEL, Gateway, GatewayFactory, batch, create, refused, step
from tests.unit.gateway.full_redis import full
from tests.unit.gateway.scripted_services import BASE, Model, ScriptedTrainer, serving
from tinsmith.internal.v1 import operation_pb2
from tinsmith.v1 import results_pb2, types_pb2


async def idle(gateway: Gateway) -> None:
    """Returns when the dispatcher has seen that nothing of the model is pending."""
    runner = gateway.dispatcher._runners[MODEL]
    async with asyncio.timeout(60):
        while runner._idle_since is None or runner._looking or runner.woken:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def under_way(gateway: Gateway, number: int) -> None:
    """Returns when so many operations of the model are under way."""
    async with asyncio.timeout(60):
        while len(gateway.dispatcher._runners[MODEL]._calls) != number:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_creation_of_which_the_trainer_has_another_one_is_executed_anew(
    redis_client: redis.asyncio.Redis, gateway: Gateway, trainer: ScriptedTrainer
) -> None:
    trainer.models[MODEL] = Model([], 0)
    trainer.strayed.add(MODEL)
    async with serving(redis_client, trainer, "trainer-0"):
        await gateway.accept(create())
        assert (await gateway.result(0)).HasField("create_model")
    assert trainer.dropped == [MODEL]
    assert trainer.calls == 2


async def test_operations_that_arrive_in_any_order_run_in_seq_id_order(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory, trainer: ScriptedTrainer
) -> None:
    async with serving(redis_client, trainer, "trainer-0"):
        gateway = await gateway_on()
        await gateway.accept(create(), step(3), batch(2))
        assert (await gateway.result(0)).HasField("create_model")
        assert trainer.order(MODEL) == [0]
        await gateway.accept(batch(1))
        assert (await gateway.result(3)).optim_step.metrics["steps"] == 4
        await asyncio.gather(gateway.result(1), gateway.result(2))
        assert trainer.order(MODEL) == [0, 1, 2, 3]
        assert sorted(gateway.recorded) == [0, 1, 2, 3]


async def test_what_redis_says_of_one_model_is_told_with_its_name(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = await gateway_on()
    await redis_client.hset(keys.lease(MODEL), "no", "lease")
    gateway.dispatcher.wake(MODEL)
    said = f"dispatch of models pauses, and a sweep goes on: {MODEL}: "
    async with asyncio.timeout(60):
        while not any(message.startswith(said) for message in caplog.messages):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_refused_operation_does_not_hold_up_the_next(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory, trainer: ScriptedTrainer
) -> None:
    async with serving(redis_client, trainer, "trainer-0"):
        gateway = await gateway_on()
        await gateway.accept(create(), step(2), refused(1))
        assert (await gateway.result(1)).error.message == "no data"
        assert (await gateway.result(2)).HasField("optim_step")
        assert trainer.order(MODEL) == [0, 2]


async def test_a_duplicate_does_not_run_twice(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory, trainer: ScriptedTrainer
) -> None:
    async with serving(redis_client, trainer, "trainer-0"):
        first, second = await gateway_on("gateway-0"), await gateway_on("gateway-1")
        await asyncio.gather(first.accept(create(), batch(1)), second.accept(create(), batch(1), step(2)))
        await asyncio.gather(first.result(2), second.result(2))
        await second.accept(step(2))
        await first.result(2)
        assert trainer.order(MODEL) == [0, 1, 2]


async def test_the_next_operation_of_a_led_model_is_sent_without_reading_the_journal(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory, trainer: ScriptedTrainer
) -> None:
    async with serving(redis_client, trainer, "trainer-0"):
        gateway = await gateway_on()
        await gateway.accept(create(), batch(1))
        await gateway.result(1)
        await idle(gateway)
        read: list[list[int]] = []
        operations = gateway.journal.operations

        async def reading(model_id: str, seq_ids: list[int]) -> list[operation_pb2.Operation | None]:
            read.append(seq_ids)
            return await operations(model_id, seq_ids)

        gateway.journal.operations = reading  # type: ignore[method-assign]
        await gateway.accept(batch(2), step(3))
        assert (await gateway.result(3)).optim_step.metrics["steps"] == 4
        await idle(gateway)
        # One that leaves a gap waits for what is missing, and what is refused is passed over.
        await gateway.accept(step(5))
        await asyncio.sleep(0.1)
        assert trainer.order(MODEL) == [0, 1, 2, 3]
        assert not any(read)
        await gateway.accept(refused(4))
        await gateway.result(5)
        await idle(gateway)
        await gateway.accept(batch(6))
        await gateway.result(6)
        assert trainer.order(MODEL) == [0, 1, 2, 3, 5, 6]
        assert [seq_ids for seq_ids in read if seq_ids] == [[5]]


async def test_who_waits_for_an_operation_that_a_trainer_has_does_not_look_for_its_result(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory, trainer: ScriptedTrainer
) -> None:
    async with serving(redis_client, trainer, "trainer-0"):
        gateway = await gateway_on()
        await gateway.accept(create())
        await gateway.result(0)
        request_id = ids.request_id(MODEL, 1)
        trainer.gate.clear()
        await gateway.accept(step(1))
        await under_way(gateway, 1)
        assert gateway.futures.expected(request_id)
        waiting = asyncio.create_task(gateway.result(1))
        trainer.gate.set()
        assert (await waiting).HasField("optim_step")
        await idle(gateway)
        assert not gateway.futures.expected(request_id)


async def test_an_operation_accepted_elsewhere_wakes_the_gateway_that_leads(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory, trainer: ScriptedTrainer
) -> None:
    async with serving(redis_client, trainer, "trainer-0"):
        leader, other = await gateway_on("gateway-0"), await gateway_on("gateway-1")
        await leader.accept(create())
        await leader.result(0)
        started_at = asyncio.get_running_loop().time()
        await other.accept(step(1))
        await other.result(1)
        assert asyncio.get_running_loop().time() - started_at < 1, "woken, not found by a sweep"
        assert leader.recorded == [0, 1]


async def test_operations_of_a_model_whose_creation_failed_fail_and_name_the_reason(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory, trainer: ScriptedTrainer
) -> None:
    trainer.fail[0] = Internal("out of memory")
    async with serving(redis_client, trainer, "trainer-0"):
        gateway = await gateway_on()
        trainer.gate.clear()
        await gateway.accept(create(), batch(1), step(2))
        await asyncio.sleep(0.1)
        trainer.gate.set()
        assert (await gateway.result(0)).error.message == "out of memory"
        await gateway.accept(batch(3))
        for seq_id in (1, 2, 3):
            error = (await gateway.result(seq_id)).error
            assert (error.category, error.code) == (types_pb2.ERROR_CATEGORY_USER, "model_not_created")
            assert "out of memory" in error.message


async def test_operations_after_an_unload_fail(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory, trainer: ScriptedTrainer
) -> None:
    async with serving(redis_client, trainer, "trainer-0"):
        gateway = await gateway_on()
        unload = operation_pb2.UnloadModel()
        await gateway.accept(
            create(), operation_pb2.Operation(model_id=MODEL, seq_id=1, unload_model=unload), step(2)
        )
        assert (await gateway.result(1)).HasField("unload_model")
        assert (await gateway.result(2)).error.code == "model_unloaded"
        await gateway.accept(step(3))
        assert (await gateway.result(3)).error.code == "model_unloaded"


async def test_an_operation_that_fails_does_not_stop_the_stream(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory, trainer: ScriptedTrainer
) -> None:
    trainer.fail[1] = Internal("not finite")
    trainer.raises[2] = InvalidRequest("the trainer will not have it")
    async with serving(redis_client, trainer, "trainer-0"):
        gateway = await gateway_on()
        await gateway.accept(create())
        await gateway.result(0)
        await gateway.accept(batch(1), batch(2), step(3))
        assert (await gateway.result(1)).error.message == "not finite"
        assert (await gateway.result(2)).error.message == "the trainer will not have it"
        assert (await gateway.result(3)).HasField("optim_step")
        assert trainer.models[MODEL].effects == [0, 3]


async def test_without_a_trainer_operations_wait_and_say_why(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory, trainer: ScriptedTrainer
) -> None:
    gateway = await gateway_on()
    await gateway.accept(create())
    view = await gateway.futures.wait(ids.request_id(MODEL, 0), 0.3)
    assert (view.state, view.queue_state) == ("pending", "paused_capacity")
    assert view.queue_state_reason == (f"no trainer for {BASE} is ready; the request will go on when one is")
    async with serving(redis_client, trainer, "trainer-0"):
        await gateway.result(0)
        trainer.gate.clear()
        await gateway.accept(step(1))
        view = await gateway.futures.wait(ids.request_id(MODEL, 1), 0.2)
        assert (view.state, view.queue_state, view.queue_state_reason) == ("pending", "active", None)
        trainer.gate.set()
        await gateway.result(1)


async def test_what_waits_says_why_also_while_redis_has_no_memory_left(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory
) -> None:
    await Journal(redis_client).accept(create(), "ann")
    async with full(redis_client):
        gateway = await gateway_on()
        async with asyncio.timeout(60):
            while not await redis_client.exists(keys.queue_state(MODEL)):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        view = await gateway.futures.wait(ids.request_id(MODEL, 0), 0)
    assert view.queue_state == "paused_capacity"


async def test_what_waits_for_a_base_model_that_is_retired_fails_and_says_so(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory, trainer: ScriptedTrainer
) -> None:
    gateway = await gateway_on()
    async with serving(redis_client, trainer, "trainer-0"):
        await gateway.discovery.refresh()
        await gateway.accept(create(), step(1))
        await gateway.result(1)
    await gateway.discovery.refresh()
    await gateway.accept(batch(2), step(3))
    await asyncio.sleep(0.1)
    assert (await gateway.futures.wait(ids.request_id(MODEL, 2), 0)).state == "pending"
    await known_models.retire(redis_client, BASE)
    await gateway.discovery.refresh()
    for seq_id in (2, 3):
        assert (await gateway.result(seq_id)).error.code == "base_model_retired"
    # Brought back, the model goes on where it was.
    async with serving(redis_client, trainer, "trainer-0"):
        await gateway.discovery.refresh()
        await gateway.accept(step(4))
        assert (await gateway.result(4)).HasField("optim_step")
        assert trainer.order(MODEL) == [0, 1, 4]


async def test_an_operation_that_cannot_be_read_fails_and_the_next_ones_run(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory, trainer: ScriptedTrainer
) -> None:
    gateway = await gateway_on()
    await gateway.accept(create(), batch(1), batch(2))
    await redis_client.hset(keys.journal(MODEL), "1", b"\xff")
    async with serving(redis_client, trainer, "trainer-0"):
        assert (await gateway.result(2)).HasField("forward_backward")
        assert (await gateway.result(1)).error.code == "record_unreadable"
        assert trainer.order(MODEL) == [0, 2]
    await gateway.stores.poison.write()
    (met,) = await gateway.stores.poison.listed()
    assert met.name == f"{keys.journal(MODEL)} 1"


async def test_a_model_whose_creation_cannot_be_read_fails_with_all_that_follows(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory, trainer: ScriptedTrainer
) -> None:
    gateway = await gateway_on()
    await gateway.accept(create(), batch(1))
    await redis_client.hset(keys.journal(MODEL), "0", b"\xff")
    async with serving(redis_client, trainer, "trainer-0"):
        for seq_id in (0, 1):
            assert (await gateway.result(seq_id)).error.code == "record_unreadable"
        await gateway.accept(batch(2))
        assert (await gateway.result(2)).error.code == "record_unreadable"
        assert trainer.order(MODEL) == []


async def test_a_model_that_cannot_be_replayed_because_of_what_cannot_be_read_is_lost(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory, trainer: ScriptedTrainer
) -> None:
    gateway = await gateway_on()
    async with serving(redis_client, trainer, "trainer-0"):
        await gateway.accept(create(), batch(1))
        await gateway.result(1)
    await redis_client.hset(keys.journal(MODEL), "1", b"\xff")
    restarted = ScriptedTrainer(Journal(redis_client), trainer.disk)
    async with serving(redis_client, restarted, "trainer-0"):
        await gateway.accept(batch(2))
        assert (await gateway.result(2)).error.code == "model_lost"


async def test_a_save_of_a_model_whose_record_cannot_be_read_fails_instead_of_waiting(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory, trainer: ScriptedTrainer
) -> None:
    async with serving(redis_client, trainer, "trainer-0"):
        gateway = await gateway_on()
        stores = gateway.stores

        async def record(
            operation: operation_pb2.Operation, result: results_pb2.OperationResult
        ) -> results_pb2.OperationResult:
            await stores.models.get(MODEL)
            return result

        gateway.dispatcher._on_result = record
        await redis_client.hset(keys.model(MODEL), "record", "{}")
        await gateway.accept(create())
        assert (await gateway.result(0)).error.code == "record_unreadable"


async def test_a_model_that_cannot_be_looked_at_keeps_no_other_from_its_gateway(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory, trainer: ScriptedTrainer
) -> None:
    async with serving(redis_client, trainer, "trainer-0"):
        broken = ids.model_id("s", 1)
        await redis_client.set(keys.journal_meta(broken), "no hash")
        await redis_client.zadd(keys.PENDING_MODELS, {broken: 0})
        # Accepted by a gateway that is gone: found by a sweep.
        await Journal(redis_client).accept(create(), "ann")
        gateway = await gateway_on()
        assert (await gateway.result(0)).HasField("create_model")


async def test_however_often_a_result_is_not_written_down_the_log_has_the_first_time_and_the_end(
    redis_client: redis.asyncio.Redis,
    gateway_on: GatewayFactory,
    trainer: ScriptedTrainer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    gateway = await gateway_on()
    record, tries = gateway.dispatcher._on_result, 0

    async def fails(
        operation: operation_pb2.Operation, result: results_pb2.OperationResult
    ) -> results_pb2.OperationResult:
        nonlocal tries
        tries += 1
        if tries <= 3:
            raise ConnectionResetError("Redis is away")
        return await record(operation, result)

    gateway.dispatcher._on_result = fails
    async with serving(redis_client, trainer, "trainer-0"):
        await gateway.accept(create())
        await gateway.result(0)
    said = [one for one in caplog.messages if one.startswith("a result is not written down yet")]
    assert said == [
        f"a result is not written down yet: {MODEL}: Redis is away",
        f"a result is not written down yet: no more of {MODEL}, after 3 failures",
    ]
