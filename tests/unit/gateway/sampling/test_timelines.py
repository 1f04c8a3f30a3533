"""What became of samples is told to the timelines of their sessions."""

from __future__ import annotations

import time

import redis.asyncio

from services.common.contract import ids
from tests.unit.gateway.sampling.dispatching import SESSION, GatewayFactory
from tests.unit.gateway.scripted_services import ScriptedSampler, serving


async def test_a_sample_is_told_of_with_when_a_sampler_had_it(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory
) -> None:
    began = time.time()
    async with serving(redis_client, ScriptedSampler("a"), "sampler-0"):
        gateway = await gateway_on()
        request_id = await gateway.sample(1)
        await gateway.result(request_id)
        while not (told := await gateway.timelines.of(ids.session_of(SESSION))):
            await gateway.timelines.flush()
    (event,) = told
    assert (event.object_id, event.seq_id, event.kind, event.outcome) == (SESSION, 1, "sample", "done")
    assert began <= event.began <= event.ended <= time.time()
