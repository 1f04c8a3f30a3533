"""What clients hear while a trainer waits for the storage of a checkpoint."""

from __future__ import annotations

import asyncio

import grpc.aio
import redis.asyncio

from services.common.contract import ids
from services.common.contract.errors import Internal, StorageAway, TinsmithError
from services.common.state import keys
from services.common.state.journal import Journal
from services.gateway.dispatch.leases import TTL_S
from services.gateway.dispatch.send_room import COPIES
from tests.unit.gateway.dispatch.test_send_room import result_of
from tests.unit.gateway.dispatching import MODEL, SETTINGS, Gateway, batch, create, load, started, step
from tests.unit.gateway.scripted_services import ScriptedTrainer, serving
from tinsmith.internal.v1 import trainer_pb2

AWAY = StorageAway("checkpoint best cannot be read at present: Connection refused")


class Outage(ScriptedTrainer):
    """One whose storage is away as soon as `away` is set, and is asked for loads again and again until it is
    `back`."""

    def __init__(self, journal: Journal) -> None:
        super().__init__(journal, {})
        self.away, self.back = asyncio.Event(), asyncio.Event()

    async def Execute(
        self, request: trainer_pb2.ExecuteRequest, context: grpc.aio.ServicerContext
    ) -> trainer_pb2.ExecuteResponse:
        if request.operation.HasField("load_state") and not self.back.is_set():
            self.calls += 1
            await self.away.wait()
            raise AWAY
        return await super().Execute(request, context)


async def reason(gateway: Gateway, seq_id: int) -> str:
    """Why an operation waits; empty = it does for no other reason than that it runs, or another one does."""
    view = await gateway.futures.wait(ids.request_id(MODEL, seq_id), 0)
    assert view.state == "pending"
    return view.queue_state_reason or ""


async def comes_to_be_why(gateway: Gateway, seq_id: int, told: str) -> None:
    async with asyncio.timeout(60):
        while await reason(gateway, seq_id) != told:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_load_whose_storage_is_away_says_so_until_it_is_done(
    redis_client: redis.asyncio.Redis, gateway: Gateway, trainer: ScriptedTrainer
) -> None:
    async with serving(redis_client, trainer, "trainer-0"):
        await gateway.accept(create())
        await gateway.result(0)
        trainer.gate.clear()
        trainer.raises[1] = AWAY
        await gateway.accept(load(1))
        await comes_to_be_why(gateway, 1, AWAY.message)
        # What comes after it waits for the same.
        await gateway.accept(step(2))
        assert await reason(gateway, 2) == AWAY.message
        trainer.gate.set()
        assert (await gateway.result(1)).HasField("load_state")
        assert (await gateway.result(2)).optim_step.metrics["steps"] == 3
        assert not await redis_client.exists(keys.queue_state(MODEL))
    assert trainer.order(MODEL) == [0, 1, 2]


class InTurn(dict[int, TinsmithError]):
    """Errors that the calls of one operation come to, one after the other."""

    def __init__(self, seq_id: int, errors: list[TinsmithError]) -> None:
        super().__init__({seq_id: errors[0]})
        self._errors = errors

    def pop(self, seq_id: int) -> TinsmithError:  # type: ignore[override]
        error = self._errors.pop(0)
        if not self._errors:
            super().pop(seq_id)
        return error


async def test_what_waited_for_the_storage_and_was_done_without_an_answer_holds_up_nothing(
    redis_client: redis.asyncio.Redis, gateway: Gateway, trainer: ScriptedTrainer
) -> None:
    lost = Internal("executed, but its result is no longer kept", "result_lost")
    async with serving(redis_client, trainer, "trainer-0"):
        await gateway.accept(create())
        await gateway.result(0)
        trainer.raises = InTurn(1, [AWAY, lost])
        await gateway.accept(load(1))
        assert (await gateway.result(1)).error.code == "result_lost"
        trainer.models[MODEL].applied = 1
        await gateway.accept(step(2))
        await gateway.result(2)
        assert not await redis_client.exists(keys.queue_state(MODEL))


async def test_what_comes_after_such_a_load_keeps_no_room_from_other_models(
    redis_client: redis.asyncio.Redis,
) -> None:
    trainer, other = Outage(Journal(redis_client)), ids.model_id("s", 1)
    large, made, asked = batch(2), create(), batch(1)
    large.forward_backward.loss_fn, asked.forward_backward.loss_fn = "x" * 100_000, "y" * 2_000
    made.model_id = asked.model_id = other
    # One trainer has half of it: the large batch and the load, and not the other model's batch.
    memory = COPIES * 2 * (large.ByteSize() + 500)
    async with (
        serving(redis_client, trainer, "trainer-0"),
        started(redis_client, "gateway-0", SETTINGS, TTL_S, memory) as gateway,
    ):
        await gateway.accept(create(), made)
        await asyncio.gather(*(result_of(gateway, model_id, 0) for model_id in (MODEL, other)))
        calls = trainer.calls
        await gateway.accept(load(1), large)
        async with asyncio.timeout(60):
            while trainer.calls < calls + 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        trainer.away.set()
        await gateway.accept(asked)
        assert (await result_of(gateway, other, 1)).HasField("forward_backward")
        assert await reason(gateway, 2) == AWAY.message
        trainer.back.set()
        assert (await result_of(gateway, MODEL, 1)).HasField("load_state")
        assert (await result_of(gateway, MODEL, 2)).HasField("forward_backward")
        async with asyncio.timeout(60):
            while gateway.dispatcher._room.free < memory:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert gateway.dispatcher._room.free == memory
    assert trainer.order(MODEL) == [0, 1, 2]
