"""Dispatch of training operations, against a scripted trainer and a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import redis.asyncio
from scripted_services import BASE, ScriptedTrainer, serving

from services.common import errors, ids
from services.common.errors import Internal, InvalidRequest
from services.common.journal import Journal
from services.gateway import dispatcher as dispatcher_module
from services.gateway import model_runner
from services.gateway.dispatch_plan import DispatchSettings
from services.gateway.dispatcher import Dispatcher
from services.gateway.futures import Futures
from services.gateway.stores import SessionRecord, SessionStore
from tinsmith.v1 import operation_pb2, types_pb2

MODEL = ids.model_id("s", 0)
SETTINGS = DispatchSettings(gap_timeout=60, trainer_poll=0.2)


def create() -> operation_pb2.Operation:
    made = operation_pb2.CreateModel(base_model=BASE, lora=types_pb2.LoraConfig(rank=8))
    return operation_pb2.Operation(model_id=MODEL, seq_id=0, create_model=made)


def batch(seq_id: int, forward_only: bool = False) -> operation_pb2.Operation:
    made = operation_pb2.ForwardBackward(loss_fn="cross_entropy", forward_only=forward_only)
    return operation_pb2.Operation(model_id=MODEL, seq_id=seq_id, forward_backward=made)


def step(seq_id: int) -> operation_pb2.Operation:
    made = operation_pb2.OptimStep(adam=types_pb2.AdamParams(learning_rate=0.1))
    return operation_pb2.Operation(model_id=MODEL, seq_id=seq_id, optim_step=made)


def refused(seq_id: int) -> operation_pb2.Operation:
    error = errors.to_pb(InvalidRequest("no data"))
    return operation_pb2.Operation(model_id=MODEL, seq_id=seq_id, refused=error)


class Gateway:
    """The dispatching half of a gateway."""

    def __init__(
        self, client: redis.asyncio.Redis, name: str, settings: DispatchSettings, ttl: float
    ) -> None:
        self.journal = Journal(client, gateway_id=name)
        self.futures = Futures(client)
        self.recorded: list[int] = []
        self.dispatcher = Dispatcher(client, self.journal, name, self._record, self.futures, settings, ttl)

    async def _record(
        self, operation: operation_pb2.Operation, result: operation_pb2.OperationResult
    ) -> None:
        view = await self.futures.wait(ids.request_id(operation.model_id, operation.seq_id), 0)
        assert view.state == "pending", "records are written before the future is resolved"
        self.recorded.append(operation.seq_id)

    async def accept(self, *operations: operation_pb2.Operation) -> None:
        for operation in operations:
            accepted = await self.journal.accept(operation, "ann")
            self.dispatcher.wake(operation.model_id, operation if accepted.to_run else None)

    async def result(self, seq_id: int, within: float = 10) -> operation_pb2.OperationResult:
        view = await self.futures.wait(ids.request_id(MODEL, seq_id), within)
        assert view.state == "done", f"operation {seq_id} is {view.state}: {view.queue_state_reason}"
        return operation_pb2.OperationResult.FromString(view.result or b"")


GatewayFactory = Callable[..., Awaitable[Gateway]]


@pytest.fixture
async def gateway_on(redis_client: redis.asyncio.Redis) -> AsyncIterator[GatewayFactory]:
    """Starts gateways, and stops them after the test."""
    async with AsyncExitStack() as running:

        async def start(
            name: str = "gateway-0", settings: DispatchSettings = SETTINGS, ttl: float = 6.0
        ) -> Gateway:
            return await running.enter_async_context(started(redis_client, name, settings, ttl))

        yield start


@asynccontextmanager
async def started(
    client: redis.asyncio.Redis, name: str, settings: DispatchSettings, ttl: float
) -> AsyncIterator[Gateway]:
    gateway = Gateway(client, name, settings, ttl)
    await gateway.futures.start()
    await gateway.dispatcher.start()
    try:
        yield gateway
    finally:
        await gateway.dispatcher.stop()
        await gateway.futures.stop()


@pytest.fixture
def trainer(redis_client: redis.asyncio.Redis) -> ScriptedTrainer:
    return ScriptedTrainer(Journal(redis_client), {})


def again(trainer: ScriptedTrainer) -> ScriptedTrainer:
    """The trainer's next start, on the same disk."""
    return ScriptedTrainer(trainer._journal, trainer.disk)


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


async def idle(gateway: Gateway) -> None:
    """Returns when the dispatcher has seen that nothing of the model is pending."""
    runner = gateway.dispatcher._runners[MODEL]
    async with asyncio.timeout(5):
        while runner._idle_since is None or runner._looking or runner.woken:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


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
        await other.result(1, within=5)
        assert (await other.result(2, within=5)).HasField("optim_step")
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
        for task in [*dying.dispatcher._leading.values(), dying.dispatcher._leases._task]:
            assert task is not None
            monkeypatch.setattr(dying.dispatcher._leases, "release", _nothing)
            task.cancel()
        dying.dispatcher._stopping = True
        assert dying.dispatcher._sweeper is not None
        dying.dispatcher._sweeper.cancel()
        other = await gateway_on("gateway-1", ttl=1.0)
        await other.accept(batch(3))
        trainer.gate.set()
        assert (await other.result(3, within=5)).HasField("forward_backward")
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


async def test_a_trainer_that_was_left_for_another_moves_no_pointer_any_more(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory, trainer: ScriptedTrainer
) -> None:
    gateway = await gateway_on()
    async with serving(redis_client, trainer, "trainer-0"):
        await gateway.accept(create(), step(1), batch(2))
        await gateway.result(2)
    another = again(trainer)
    async with serving(redis_client, another, "trainer-1"):
        await gateway.accept(batch(3))
        await gateway.result(3)
        # Cut off and alive: it made more of the model than was ever asked of the other.
        assert not await gateway.journal.mark_durable(MODEL, trainer.epochs[MODEL], 9, "9-0")
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


async def test_a_gap_is_skipped_after_its_time_and_its_latecomer_fails(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory, trainer: ScriptedTrainer
) -> None:
    async with serving(redis_client, trainer, "trainer-0"):
        gateway = await gateway_on(settings=DispatchSettings(gap_timeout=0.3))
        await gateway.accept(create(), step(3))
        assert (await gateway.result(3)).HasField("optim_step")
        await gateway.accept(batch(1))
        assert (await gateway.result(1)).error.code == "seq_id_used"
        assert trainer.order(MODEL) == [0, 3]


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
    sessions = SessionStore(redis_client)
    await sessions.create(SessionRecord(session_id="s", owner="ann", created_at=1.0, last_heartbeat=1.0))
    async with serving(redis_client, trainer, "trainer-0"):
        gateway = await gateway_on()
        await gateway.accept(create())
        await gateway.result(0)
        await asyncio.sleep(0.3)
        assert gateway.dispatcher._leading
        await sessions.finish("s", "success", "")
        for _ in range(100):
            if not gateway.dispatcher._leading:
                break
            await asyncio.sleep(0.02)
        assert not gateway.dispatcher._leading


async def test_a_gap_of_a_finished_session_is_skipped_at_once(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory, trainer: ScriptedTrainer
) -> None:
    sessions = SessionStore(redis_client)
    await sessions.create(SessionRecord(session_id="s", owner="ann", created_at=1.0, last_heartbeat=1.0))
    async with serving(redis_client, trainer, "trainer-0"):
        gateway = await gateway_on()
        await gateway.accept(create(), step(2))
        assert (await gateway.futures.wait(ids.request_id(MODEL, 2), 0.3)).state == "pending"
        await sessions.finish("s", "success", "")
        assert (await gateway.result(2)).HasField("optim_step")


async def test_without_a_trainer_operations_wait_and_say_why(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory, trainer: ScriptedTrainer
) -> None:
    gateway = await gateway_on()
    await gateway.accept(create())
    view = await gateway.futures.wait(ids.request_id(MODEL, 0), 0.3)
    assert (view.state, view.queue_state) == ("pending", "paused_capacity")
    assert view.queue_state_reason == f"no trainer for {BASE} is running; the request will run when one is"
    async with serving(redis_client, trainer, "trainer-0"):
        await gateway.result(0)
        trainer.gate.clear()
        await gateway.accept(step(1))
        view = await gateway.futures.wait(ids.request_id(MODEL, 1), 0.2)
        assert (view.state, view.queue_state, view.queue_state_reason) == ("pending", "active", None)
        trainer.gate.set()
        await gateway.result(1)


async def test_a_lost_state_fails_the_model_instead_of_hanging(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory, trainer: ScriptedTrainer
) -> None:
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
        for _ in range(50):
            await asyncio.sleep(0.02)
            if not gateway.dispatcher._leading:
                break
        assert not gateway.dispatcher._leading
        other = await gateway_on("gateway-1")
        await other.accept(step(1))
        await other.result(1)
        assert other.recorded == [1]
