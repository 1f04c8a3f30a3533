"""With a Redis that has no memory left processes start, and keep what they hold."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import redis.asyncio
from redis.exceptions import OutOfMemoryError

from services.common.state import keys, known_models, versions
from services.common.state.claim import Claim
from services.common.state.kept_lease import KeptLease
from services.common.state.known_models import Configured

CONFIGURED = (Configured(name="a/b"), Configured(name="c/d", trained=False))


@pytest.fixture
async def full_redis(any_redis: redis.asyncio.Redis) -> AsyncIterator[redis.asyncio.Redis]:
    """As a cluster left it, with no memory for anything new."""
    await versions.join(any_redis)
    await known_models.configure(any_redis, CONFIGURED)
    await any_redis.config_set("maxmemory", 1)
    try:
        with pytest.raises(OutOfMemoryError):
            await any_redis.set("new", "")
        yield any_redis
    finally:
        await any_redis.config_set("maxmemory", 0)


async def test_a_process_claims_its_id(full_redis: redis.asyncio.Redis) -> None:
    claim = Claim(full_redis, "trainer", "trainer-0")
    await claim.take()
    await claim.give_back()
    assert await full_redis.get(keys.claim("trainer", "trainer-0")) is None


async def test_a_lease_is_taken_and_kept(full_redis: redis.asyncio.Redis) -> None:
    lease = KeptLease(full_redis, "lease", "me", 60, "lease of this test")
    assert [await lease.take() for _ in range(2)] == [True, True]
    await lease.give_back()
    assert not await lease.is_taken()


async def test_a_gateway_starts_that_is_configured_as_before(full_redis: redis.asyncio.Redis) -> None:
    for release in (versions.Range(), versions.Range(versions.CONTRACT + 1, versions.CONTRACT)):
        await versions.join(full_redis, release)
    await known_models.configure(full_redis, CONFIGURED)
    with pytest.raises(OutOfMemoryError):
        await known_models.configure(full_redis, [Configured(name="e/f")])
