"""What is remembered of sessions."""

from __future__ import annotations

import redis.asyncio

from services.common.state import keys
from services.common.state.poison import Poison
from services.gateway.records.session import SessionStore

MANY = 20_000
MOST_AT_ONCE = 1000


async def test_what_a_session_made_is_listed_in_order_and_read_in_parts(
    any_redis: redis.asyncio.Redis,
) -> None:
    made = [f"session-1:sample:{number}" for number in range(MANY)]
    await any_redis.sadd(keys.session_samplers("session-1"), *reversed(made))
    await any_redis.config_resetstat()
    found = await SessionStore(any_redis, Poison(any_redis)).samplers("session-1")
    assert found == made
    commands = await any_redis.info("commandstats")
    assert sum(row["calls"] for row in commands.values()) > MANY / MOST_AT_ONCE
