"""A lease that is kept, and one that another holder took."""

from __future__ import annotations

import asyncio

import redis.asyncio

from services.common.process.periodic import FAILURES
from services.common.state.kept_lease import KeptLease

KEY = "lease-of:some-session"


async def test_a_lease_that_another_holder_took_is_told_and_no_key_names_its_failures(
    any_redis: redis.asyncio.Redis,
) -> None:
    lease = KeptLease(any_redis, KEY, "one", 60.0, "lease of a test")
    assert await lease.take()
    lost, renewed = asyncio.Event(), []

    async def also() -> None:
        renewed.append(1)

    async with lease.kept(0.02, also, lost.set):
        while not renewed:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert not lost.is_set()
        await any_redis.set(KEY, "another")
        async with asyncio.timeout(60):
            await lost.wait()
        times = len(renewed)
        await asyncio.sleep(0.1)
        # What only the holder may do is not done any more.
        assert len(renewed) == times
    await lease.give_back()
    assert await any_redis.get(KEY) == b"another"
    works = {sample.labels["work"] for metric in FAILURES.collect() for sample in metric.samples}
    assert "renewal of the lease of a test" in works
    assert not [work for work in works if KEY in work]
