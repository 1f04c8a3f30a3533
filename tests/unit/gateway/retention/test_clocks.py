"""One clock that is wrong, a gateway's or Redis', lets nothing go that is of use."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import redis.asyncio

from services.common.process import clock
from services.common.state.claim import claimed
from services.common.state.journal import Journal
from services.common.storage.data_dir import DataDir
from services.gateway.cluster.redis_restart import RedoLog
from services.gateway.records.checkpoint import CheckpointRecord
from services.gateway.records.stores import Stores
from services.gateway.retention.snapshot_plan import SnapshotBudget
from services.gateway.retention.snapshot_room import SnapshotRoom
from tests.unit.gateway.retention.stage import Stage

LONG_S = 10 * 24 * 3600.0
TEN_MINUTES_S = 600.0
Clocks = Callable[[float, float], None]

_now = time.time


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clocks]:
    """Has this gateway's clock, and Redis', go wrong by so many seconds."""

    def wrong(own: float, of_redis: float) -> None:
        monkeypatch.setattr(time, "time", lambda: _now() + own)
        clock.hear(_now() + of_redis)

    wrong(0.0, 0.0)
    yield wrong


@pytest.mark.parametrize("own, of_redis", [(LONG_S, 0.0), (0.0, LONG_S), (-LONG_S, LONG_S)])
async def test_a_session_is_not_over_for_a_clock_that_went_ahead(
    stage: Stage, clocks: Clocks, own: float, of_redis: float
) -> None:
    session_id = await stage.session()
    clocks(own, of_redis)
    await stage.retention._sweep_if_due()
    assert not (await stage.record(session_id)).finished


@pytest.mark.parametrize("own, of_redis", [(-LONG_S, 0.0), (0.0, -LONG_S)])
async def test_a_sign_of_life_counts_whoever_noted_it_by_a_clock_that_was_behind(
    stage: Stage, clocks: Clocks, own: float, of_redis: float
) -> None:
    clocks(own, of_redis)
    session_id = await stage.session()
    await stage.sessions.heartbeat("ann", session_id)
    clocks(0.0, 0.0)
    await stage.retention._sweep_if_due()
    assert not (await stage.record(session_id)).finished


async def test_a_gateway_knows_the_clock_of_redis_from_its_start(
    stage: Stage, redis_url: str, clocks: Clocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    session_id = await stage.session()
    clocks(LONG_S, LONG_S)
    monkeypatch.setattr(clock, "_ahead", None)
    async with claimed(redis_url, "gateway", "gateway-0"):
        await stage.retention._sweep_if_due()
    assert not (await stage.record(session_id)).finished


async def test_a_gateway_asks_redis_for_its_clock_all_the_time(stage: Stage, clocks: Clocks) -> None:
    session_id = await stage.session()
    clocks(LONG_S, LONG_S)
    await RedoLog(stage.redis)._look()
    await stage.retention._sweep_if_due()
    assert not (await stage.record(session_id)).finished


async def test_a_session_that_is_silent_by_both_clocks_is_over(stage: Stage, clocks: Clocks) -> None:
    session_id = await stage.session()
    clocks(LONG_S, LONG_S)
    await stage.retention._sweep_if_due()
    assert (await stage.record(session_id)).finished


async def test_a_snapshot_that_is_sampled_stays_also_where_the_gateway_that_samples_is_behind(
    redis_client: redis.asyncio.Redis, data: DataDir, clocks: Clocks
) -> None:
    snapshots = Stores.over(redis_client).snapshots
    room = SnapshotRoom(snapshots, data, SnapshotBudget(total_bytes=1, owner_bytes=1))
    clocks(-TEN_MINUTES_S, 0.0)
    for version in (1, 2):
        await snapshots.add("s:train:0", version, "ann", 10)
    clocks(0.0, 0.0)
    await room.keep_within()
    assert {one.version for one in await snapshots.of_model("s:train:0")} == {1, 2}


async def test_a_checkpoint_lives_until_its_time_by_both_clocks(stage: Stage, clocks: Clocks) -> None:
    await stage.checkpoints.put(
        CheckpointRecord(
            model_id="s:train:0",
            checkpoint_id="weights/kept",
            owner="ann",
            kind="training",
            version=1,
            size_bytes=1,
            created_at=_now(),
            expires_at=_now() + 100,
            base_model="org/tiny",
            lora_rank=8,
        )
    )
    for own, of_redis, lives in ((200.0, 0.0, True), (0.0, 200.0, True), (200.0, 200.0, False)):
        clocks(own, of_redis)
        assert bool(await stage.checkpoints.due(1)) != lives
        assert bool(await stage.checkpoints.get("s:train:0", "weights/kept")) == lives


@pytest.mark.parametrize("of_the_one_that_lists, of_the_other", [(-TEN_MINUTES_S, 0.0), (0.0, TEN_MINUTES_S)])
async def test_a_model_that_gets_work_just_now_stays_listed(
    redis_client: redis.asyncio.Redis, clocks: Clocks, of_the_one_that_lists: float, of_the_other: float
) -> None:
    journal = Journal(redis_client)
    clocks(of_the_one_that_lists, 0.0)
    await journal._announce("s:train:0")
    clocks(of_the_other, 0.0)
    for model_id, listed_at in await journal.models_with_work():
        await journal.forget_idle(model_id, listed_at)
    assert [model_id for model_id, _ in await journal.models_with_work()] == ["s:train:0"]
