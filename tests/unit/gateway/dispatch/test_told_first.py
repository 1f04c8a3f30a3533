"""What clients are told before it is written down, and what a gateway leaves that dies in between."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis.asyncio

from services.common.contract import ids
from services.common.state import keys
from services.common.state.journal_records import Published
from services.gateway.dispatch import dispatcher as dispatcher_module
from tests.unit.gateway.dispatching import MODEL, Gateway, GatewayFactory, again, batch, create, step
from tests.unit.gateway.scripted_services import ScriptedTrainer, serving


def writes_when(gateway: Gateway, may_write: asyncio.Event) -> None:
    """Has a gateway write no result down before the event is set."""
    publish = gateway.journal.publish

    async def publishing(*args: Any, **options: Any) -> Published:
        await may_write.wait()
        return await publish(*args, **options)

    gateway.journal.publish = publishing  # type: ignore[method-assign]


async def written(client: redis.asyncio.Redis, seq_id: int) -> bool:
    return bool(await client.hget(keys.future(MODEL, seq_id), "state") == b"done")


async def test_who_waits_has_a_forward_before_it_is_written_and_nothing_else(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory, trainer: ScriptedTrainer
) -> None:
    async with serving(redis_client, trainer, "trainer-0"):
        gateway = await gateway_on()
        await gateway.accept(create())
        await gateway.result(0)
        may_write = asyncio.Event()
        writes_when(gateway, may_write)
        await gateway.accept(batch(1, forward_only=True))
        assert (await gateway.result(1)).HasField("forward_backward")
        assert not await written(redis_client, 1)
        await gateway.accept(batch(2))
        async with asyncio.timeout(10):
            while 2 not in gateway.recorded:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (await gateway.futures.wait(ids.request_id(MODEL, 2), 0.2)).state == "pending"
        may_write.set()
        assert (await gateway.result(2)).HasField("forward_backward")
        assert await written(redis_client, 1)


async def test_under_a_lease_that_may_have_run_out_nothing_is_told_before_it_is_written(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory, trainer: ScriptedTrainer
) -> None:
    async with serving(redis_client, trainer, "trainer-0"):
        gateway = await gateway_on()
        await gateway.accept(create())
        await gateway.result(0)
        may_write = asyncio.Event()
        writes_when(gateway, may_write)
        trainer.gate.clear()
        await gateway.accept(batch(1, forward_only=True))
        await gateway.dispatcher._leases._renewals.stop()
        gateway.dispatcher._leases._held[MODEL].valid_until = asyncio.get_running_loop().time()
        trainer.gate.set()
        assert (await gateway.futures.wait(ids.request_id(MODEL, 1), 0.5)).state == "pending"
        may_write.set()
        assert (await gateway.result(1)).HasField("forward_backward")


@pytest.mark.parametrize("trainer_dies", [False, True])
async def test_a_gateway_that_dies_before_it_writes_what_it_told_leaves_the_same_to_the_next(
    redis_client: redis.asyncio.Redis,
    gateway_on: GatewayFactory,
    trainer: ScriptedTrainer,
    monkeypatch: pytest.MonkeyPatch,
    trainer_dies: bool,
) -> None:
    monkeypatch.setattr(dispatcher_module, "_SWEEP_S", 0.1)
    dying = await gateway_on("gateway-0", ttl=1.0)
    async with serving(redis_client, trainer, "trainer-0") as served:
        await dying.accept(create(), step(1))
        await dying.result(1)
        writes_when(dying, asyncio.Event())
        await dying.accept(batch(2, forward_only=True))
        told = await dying.result(2)
        for task in dying.dispatcher._leading.values():
            task.cancel()
        dying.dispatcher._running = False
        await dying.dispatcher._leases._renewals.stop()
        await dying.dispatcher._sweeps.stop()
        if trainer_dies:
            await served.kill()
            trainer = again(trainer)
        async with serving(redis_client, trainer, "trainer-0"):
            other = await gateway_on("gateway-1", ttl=1.0)
            assert await other.result(2, within=60) == told
            await other.accept(step(3))
            assert (await other.result(3)).optim_step.metrics["steps"] == 3
    assert trainer.order(MODEL) == ([2, 3] if trainer_dies else [0, 1, 2, 3])
