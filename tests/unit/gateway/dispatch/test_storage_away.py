"""What clients hear while a trainer waits for the storage of a checkpoint."""

from __future__ import annotations

import asyncio

import redis.asyncio

from services.common.contract import ids
from services.common.contract.errors import Internal, StorageAway, TinsmithError
from services.common.state import keys
from tests.unit.gateway.dispatching import MODEL, Gateway, create, load, step
from tests.unit.gateway.scripted_services import ScriptedTrainer, serving

AWAY = StorageAway("checkpoint best cannot be read at present: Connection refused")


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
        # What comes after it is sent to the trainer, and waits there for the same.
        calls = trainer.calls
        await gateway.accept(step(2))
        while trainer.calls == calls:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
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
