"""A gateway starts, and what is let go is taken off the count, also while Redis has no memory left."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import redis.asyncio

from services.common.state import keys
from services.gateway.records.stores import Stores
from services.gateway.retention.sweep_lease import SweepLease

MODEL = "0b0e9f2c-7a55-4c3e-9a43-000000000001:train:0"


@asynccontextmanager
async def full(client: redis.asyncio.Redis) -> AsyncIterator[None]:
    """Without memory for anything new."""
    await client.config_set("maxmemory", 1)
    try:
        yield
    finally:
        await client.config_set("maxmemory", 0)


async def test_a_gateway_takes_the_lease_on_a_sweep(any_redis: redis.asyncio.Redis) -> None:
    mine, other = (SweepLease(any_redis, keys.SNAPSHOT_SWEEP_LEASE, name) for name in ("a", "b"))
    async with full(any_redis):
        assert [await mine.take(), await mine.take(), await other.take()] == [True, True, False]
    assert 50_000 < await any_redis.pttl(keys.SNAPSHOT_SWEEP_LEASE) <= 60_000


async def test_a_gateway_becomes_one_that_may_have_samples(any_redis: redis.asyncio.Redis) -> None:
    samples = Stores.over(any_redis).samples
    async with full(any_redis):
        await samples.join("gateway-0")
    assert await samples.gateways() == {"gateway-0"}


async def test_a_snapshot_is_forgotten(any_redis: redis.asyncio.Redis) -> None:
    snapshots = Stores.over(any_redis).snapshots
    for version in (1, 2):
        await snapshots.add(MODEL, version, "ann", 10)
    async with full(any_redis):
        await snapshots.forget(MODEL, 1, "ann")
    assert await snapshots.owners() == {"ann": 10}
    assert [one.version for one in await snapshots.of_model(MODEL)] == [2]
