"""What clients hear while a trainer waits for the storage of a checkpoint."""

from __future__ import annotations

import asyncio

import redis.asyncio

from services.common.contract import ids
from services.common.contract.errors import StorageAway
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
