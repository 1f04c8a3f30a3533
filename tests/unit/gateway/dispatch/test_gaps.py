"""What becomes of operations that wait for one whose number was used and that was never sent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import redis.asyncio

from services.common.contract import ids
from services.common.state import keys
from services.gateway.dispatch.plan import DispatchSettings
from services.gateway.records.session import SessionRecord
from services.gateway.records.stores import Stores
from tests.unit.gateway.dispatching import MODEL, GatewayFactory, batch, create, step
from tests.unit.gateway.scripted_services import ScriptedTrainer, serving


async def waits_because(why: Callable[[], Awaitable[str | None]], reason: str) -> None:
    """Returns when something waits for this reason."""
    async with asyncio.timeout(60):
        while await why() != reason:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


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


async def test_what_waits_for_a_missing_operation_names_it_until_it_comes(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory, trainer: ScriptedTrainer
) -> None:
    async def why() -> str | None:
        view = await gateway.futures.wait(ids.request_id(MODEL, 4), 0)
        return view.queue_state_reason

    async with serving(redis_client, trainer, "trainer-0"):
        gateway = await gateway_on(settings=DispatchSettings(gap_timeout=60, gap_patience=2.0))
        await gateway.accept(create(), step(4))
        await gateway.result(0)
        # Requests that were sent at once overtake each other, which is nothing to speak of.
        assert await why() is None
        await waits_because(
            why, "seq_ids 1 to 3 did not arrive; what comes after them waits for 60 s at most"
        )
        await gateway.accept(batch(1), batch(2))
        await gateway.result(2)
        await waits_because(why, "seq_id 3 did not arrive; what comes after it waits for 60 s at most")
        await gateway.accept(batch(3))
        await gateway.result(4)
        assert not await redis_client.exists(keys.queue_state(MODEL))


async def test_a_gap_of_a_finished_session_is_skipped_at_once(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory, trainer: ScriptedTrainer
) -> None:
    sessions = Stores.over(redis_client).sessions
    await sessions.create(SessionRecord(session_id="s", owner="ann", created_at=1.0, last_heartbeat=1.0))
    async with serving(redis_client, trainer, "trainer-0"):
        gateway = await gateway_on()
        await gateway.accept(create(), step(2))
        assert (await gateway.futures.wait(ids.request_id(MODEL, 2), 0.3)).state == "pending"
        await sessions.finish("s", "success", "")
        assert (await gateway.result(2)).HasField("optim_step")
