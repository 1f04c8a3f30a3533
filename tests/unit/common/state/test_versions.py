"""Neighbouring releases work together; others refuse, and say what to do."""

from __future__ import annotations

import pytest
import redis.asyncio

from services.common.contract.errors import Conflict
from services.common.state import versions
from services.common.state.versions import Range, together

FIRST, SECOND, THIRD = Range(1, 1), Range(2, 1), Range(3, 2)


def test_neighbours_work_together_and_others_do_not() -> None:
    for one, other in ((FIRST, FIRST), (FIRST, SECOND), (SECOND, THIRD)):
        assert together(one, other)
        assert together(other, one)
    assert not together(FIRST, THIRD)
    assert not together(THIRD, FIRST)


async def test_an_upgrade_and_its_rollback_find_each_other_s_state(any_redis: redis.asyncio.Redis) -> None:
    for release in (FIRST, SECOND, FIRST, SECOND, THIRD, SECOND):
        await versions.join(any_redis, release)


async def test_a_release_that_cannot_read_what_is_there_does_not_start(
    any_redis: redis.asyncio.Redis,
) -> None:
    await versions.join(any_redis, THIRD)
    with pytest.raises(Conflict, match="contract 2 to 3, this release works with 1: start a newer release"):
        await versions.join(any_redis, FIRST)
    # What was refused has noted nothing.
    await versions.join(any_redis, SECOND)


async def test_no_release_is_skipped(any_redis: redis.asyncio.Redis) -> None:
    await versions.join(any_redis, FIRST)
    with pytest.raises(Conflict, match="releases in between"):
        await versions.join(any_redis, THIRD)


async def test_this_release_joins_an_empty_redis(redis_client: redis.asyncio.Redis) -> None:
    await versions.join(redis_client)
    await versions.join(redis_client)
    with pytest.raises(Conflict):
        await versions.join(redis_client, Range(versions.CONTRACT + 2, versions.CONTRACT + 1))
