"""What samples used is counted by the gateway that writes their results down."""

from __future__ import annotations

import time

import redis.asyncio

from services.gateway.records.usage import UsageStore, day_of
from tests.unit.gateway.sampling.dispatching import GatewayFactory
from tests.unit.gateway.scripted_services import BASE, ScriptedSampler, serving


async def test_a_sample_is_counted_for_its_owner_however_often_it_is_sent(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory
) -> None:
    began = time.time()
    async with serving(redis_client, ScriptedSampler("a"), "sampler-0"):
        gateway = await gateway_on()
        for _ in range(2):
            request_id = await gateway.sample(1, prompt=bytes(20))
            assert (await gateway.result(request_id)).HasField("sample")
    found = await UsageStore(redis_client).used("ann", sorted({day_of(began), day_of(time.time())}))
    amounts = {one.kind: one.amount for one in found}
    assert amounts["prefilled"] + amounts.get("cached", 0) == 5
    assert {(one.base_model, one.session, one.run) for one in found} == {(BASE, "s", "")}
