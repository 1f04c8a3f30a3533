"""What a Redis that lost power forgot of samples is written again."""

from __future__ import annotations

import redis.asyncio

from services.common.state import keys
from tests.unit.gateway.sampling.dispatching import SESSION, GatewayFactory, until
from tests.unit.gateway.scripted_services import ScriptedSampler, serving


async def test_a_result_of_the_second_that_redis_lost_is_written_and_told_again(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory
) -> None:
    sampler = ScriptedSampler("a")
    async with serving(redis_client, sampler, "sampler-0"):
        gateway = await gateway_on()
        request_id = await gateway.sample(0)
        assert await gateway.tokens(request_id) == b"a"
        await until(lambda: not gateway.futures.is_resolving(request_id))
        lost = [keys.future(SESSION, 0), keys.completions(SESSION, 0)]
        assert await redis_client.delete(*lost) == len(lost)
        assert (await gateway.journal.completions(SESSION, 0, 0))[0] == []
        await gateway.dispatcher._redo_log._repeat()
        ((told,), _) = await gateway.journal.completions(SESSION, 0, 0)
        assert told.request_id == request_id and await gateway.tokens(request_id) == b"a"
        # What was not lost stays as it is.
        await gateway.dispatcher._redo_log._repeat()
        assert (await gateway.journal.completions(SESSION, 0, 0))[0] == [told]
        assert sampler.served == [request_id]
