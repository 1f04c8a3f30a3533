"""What Redis did, and its answer was lost on the way, takes effect all the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import redis.asyncio

from services.common.state import redis_client as connections
from services.common.state import scripts
from services.gateway.records.sample_journal import Resolution
from tests.unit.gateway.sampling.dispatching import GatewayFactory, running_sample, until


@pytest.fixture
def lost_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first answer to every step is lost, and redis-py has it made again."""

    async def twice(client: redis.asyncio.Redis, commands: Sequence[bytes]) -> list[Any]:
        await connections.round_trip(client, commands)
        return await connections.round_trip(client, commands)

    monkeypatch.setattr(scripts, "round_trip", twice)


@pytest.mark.usefixtures("lost_answers")
async def test_a_sample_is_stopped_although_the_answer_to_its_cancellation_was_lost(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory
) -> None:
    async with running_sample(redis_client, gateway_on) as (gateway, sampler, request_id):
        # The first time Redis does not know the script yet, and runs it once.
        await gateway.journal.cancel(await gateway.sample(1), "given up")
        assert await gateway.journal.cancel(request_id, "given up") is Resolution.BEFORE
        await until(lambda: request_id in sampler.ended)
