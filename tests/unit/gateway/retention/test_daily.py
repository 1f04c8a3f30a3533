"""What is done once a day is done by one gateway, and that it failed is seen by all of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import redis.asyncio

from services.common.contract.errors import Unavailable
from services.common.state import keys
from services.common.storage.data_dir import DataDir
from services.common.storage.directory import DirectoryStorage
from services.gateway.checkpoints.files import CheckpointFiles
from services.gateway.records.stores import Stores
from services.gateway.retention.checkpoint_sweep import CheckpointSweep
from services.gateway.retention.daily import DEADLINE_S, Daily
from services.gateway.retention.orphan_sweep import OrphanSweep

DAY = 24 * 3600
MARK = "tinsmith:daily-of-a-test"


class Work:
    """Fails while it is told to."""

    def __init__(self) -> None:
        self.done = 0
        self.fails = False

    async def __call__(self) -> None:
        if self.fails:
            raise OSError("the disk is away")
        self.done += 1


async def test_gateways_do_it_once_a_day_between_them(redis_client: redis.asyncio.Redis) -> None:
    work = Work()
    for _ in range(2):
        await Daily(redis_client, "work", MARK, work).look()
    assert work.done == 1
    assert DAY - 60 < await redis_client.ttl(MARK) <= DAY


async def test_that_it_failed_is_seen_by_every_look_until_it_is_begun_anew(
    redis_client: redis.asyncio.Redis,
) -> None:
    work = Work()
    here, elsewhere = (Daily(redis_client, "work", MARK, work) for _ in range(2))
    work.fails = True
    with pytest.raises(OSError, match="the disk is away"):
        await here.look()
    work.fails = False
    for gateway in (here, elsewhere):
        with pytest.raises(Unavailable, match="it failed when it was begun last: the disk is away"):
            await gateway.look()
    assert DEADLINE_S - 60 < await redis_client.ttl(MARK) <= DEADLINE_S
    await redis_client.delete(MARK)
    await elsewhere.look()
    await here.look()
    assert work.done == 1


async def test_both_kinds_of_it_are_done_by_a_gateway_that_starts(
    redis_client: redis.asyncio.Redis, tmp_path: Path
) -> None:
    stores, data = Stores.over(redis_client), DataDir(tmp_path)
    (storage := tmp_path / "checkpoints").mkdir()
    files = CheckpointFiles(DirectoryStorage(storage), data, stores.sampling_sessions, stores.sessions)
    sweeps = (
        OrphanSweep(redis_client, data),
        CheckpointSweep(redis_client, stores.checkpoints, files, "gateway-0"),
    )
    for sweep in sweeps:
        await sweep.start()
    async with asyncio.timeout(60):
        for mark in (keys.ORPHAN_SEARCH, keys.CHECKPOINT_CLEANING):
            while await redis_client.ttl(mark) <= DEADLINE_S:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    for sweep in sweeps:
        await sweep.stop()
