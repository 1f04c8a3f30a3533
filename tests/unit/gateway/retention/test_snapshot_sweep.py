"""Unnamed snapshots stay within their budgets, on a real Redis and a real directory."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import redis.asyncio
from redis.exceptions import RedisError

from services.common.contract.errors import LimitReached
from services.common.state import keys
from services.common.storage.data_dir import DataDir
from services.gateway.records.sampling_session import SamplingSessionRecord
from services.gateway.records.session import SessionRecord
from services.gateway.records.stores import Stores
from services.gateway.retention import snapshot_room
from services.gateway.retention.snapshot_plan import SnapshotBudget
from services.gateway.retention.snapshot_room import SnapshotRoom, budget_on
from services.gateway.retention.snapshot_sweep import SnapshotSweep

SESSION = "0b0e9f2c-7a55-4c3e-9a43-000000000001"
MODEL = f"{SESSION}:train:0"
OWNER = "alice"
LONG_AGO = 7200


class Stage:
    """Snapshots of a model, as files and in the list."""

    def __init__(self, client: redis.asyncio.Redis, root: Path) -> None:
        self.redis = client
        self.stores = Stores.over(client)
        self.data = DataDir(root)
        self.room = SnapshotRoom(self.stores.snapshots, self.data, SnapshotBudget(100, 60))
        self.sweeps = SnapshotSweep(client, self.stores, self.room, "gateway-0")

    async def save(self, version: int, size: int = 20, age: float = LONG_AGO) -> Path:
        path = self.data.snapshot(MODEL, version)
        path.mkdir(parents=True)
        await self.stores.snapshots.add(MODEL, version, OWNER, size)
        await self.used(version, age)
        return path

    async def used(self, version: int, ago: float) -> None:
        """A snapshot that is listed was sampled so many seconds ago."""
        for name in (keys.SNAPSHOTS_USED, keys.owner_snapshots(OWNER)):
            await self.redis.zadd(name, {f"{MODEL}@{version}": time.time() - ago}, xx=True)

    async def sampler(self, version: int, inflight: bool = False) -> None:
        await self.stores.sampling_sessions.create_if_absent(
            SamplingSessionRecord(
                sampling_session_id=f"{SESSION}:sample:{version}",
                session_id=SESSION,
                owner=OWNER,
                base_model="org/tiny",
                model_id=MODEL,
                version=version,
                inflight=inflight,
            )
        )


@pytest.fixture
async def stage(redis_client: redis.asyncio.Redis, tmp_path: Path) -> Stage:
    stage = Stage(redis_client, tmp_path)
    now = time.time()
    await stage.stores.sessions.create(
        SessionRecord(session_id=SESSION, owner=OWNER, created_at=now, last_heartbeat=now)
    )
    return stage


async def test_a_snapshot_is_counted_once_and_leaves_nothing_when_it_is_forgotten(stage: Stage) -> None:
    await stage.stores.snapshots.add(MODEL, 1, OWNER, 20)
    await stage.stores.snapshots.add(MODEL, 1, OWNER, 20)
    assert await stage.stores.snapshots.owners() == {OWNER: 20}
    for _ in range(2):
        await stage.stores.snapshots.forget(MODEL, 1, OWNER)
    assert await stage.stores.snapshots.owners() == {}
    assert await stage.redis.keys("*{snapshots}*") == []


async def test_what_was_not_sampled_for_longest_makes_room(stage: Stage) -> None:
    paths = [await stage.save(version, age=9000 - version) for version in range(1, 6)]
    await stage.sweeps.sweep()
    assert [path.exists() for path in paths] == [False, False, True, True, True]
    assert await stage.stores.snapshots.owners() == {OWNER: 60}
    assert await stage.stores.snapshots.was_let_go(MODEL, 1)
    assert not await stage.stores.snapshots.was_let_go(MODEL, 3)


async def test_sampling_keeps_a_snapshot(stage: Stage) -> None:
    oldest = await stage.save(1, age=9000)
    others = [await stage.save(version) for version in (2, 3, 4)]
    await stage.stores.snapshots.note_used(MODEL, 1, OWNER)
    await stage.sweeps.sweep()
    assert oldest.exists()
    assert [path.exists() for path in others] == [False, True, True]


async def test_a_use_that_redis_could_not_note_is_noted_the_next_time(stage: Stage) -> None:
    oldest, snapshots = await stage.save(1, age=9000), stage.stores.snapshots
    for version in (2, 3, 4):
        await stage.save(version)
    listed = keys.owner_snapshots(OWNER)
    await stage.redis.rename(listed, "aside{snapshots}")
    await stage.redis.set(listed, "no list")
    with pytest.raises(RedisError):
        await snapshots.note_used(MODEL, 1, OWNER)
    await stage.redis.rename("aside{snapshots}", listed)
    await snapshots.note_used(MODEL, 1, OWNER)
    assert [one.version for one in await snapshots.oldest(9, OWNER)][-1] == 1
    await stage.sweeps.sweep()
    assert oldest.exists()


async def test_a_version_that_inflight_sessions_left_goes_at_once(stage: Stage) -> None:
    first, second = await stage.save(1, age=0), await stage.save(2, age=0)
    await stage.sampler(1, inflight=True)
    await stage.stores.inflight.move(MODEL, 2)
    await stage.stores.snapshots.supersede(MODEL, 1, time.time() + 60)
    await stage.sweeps.sweep()
    assert first.exists()
    await stage.stores.snapshots.supersede(MODEL, 1, time.time() - 1)
    await stage.sweeps.sweep()
    assert (first.exists(), second.exists()) == (False, True)
    assert await stage.redis.zcard(keys.SNAPSHOTS_SUPERSEDED) == 0


async def test_a_version_that_another_session_answers_from_stays(stage: Stage) -> None:
    path = await stage.save(1, age=0)
    await stage.sampler(1)
    await stage.stores.snapshots.supersede(MODEL, 1, time.time() - 1)
    await stage.sweeps.sweep()
    assert path.exists()
    assert await stage.redis.zcard(keys.SNAPSHOTS_SUPERSEDED) == 0


def test_budgets_are_shares_of_the_volume_unless_they_are_numbers(tmp_path: Path) -> None:
    share = budget_on(DataDir(tmp_path), 0, 0)
    assert share.total_bytes > share.owner_bytes > 0
    assert budget_on(DataDir(tmp_path), 100, 10) == SnapshotBudget(100, 10)


async def test_a_snapshot_whose_clients_cannot_be_read_stops_no_other(stage: Stage) -> None:
    broken, whole = await stage.save(1, age=0), await stage.save(2, age=0)
    await stage.sampler(1, inflight=True)
    await stage.redis.set(keys.sampling_session(f"{SESSION}:sample:1"), b"{}")
    for version in (1, 2):
        await stage.stores.snapshots.supersede(MODEL, version, time.time() - 10 + version)
    full = [await stage.save(version) for version in range(3, 8)]
    await stage.sweeps.sweep()
    assert (broken.exists(), whole.exists()) == (True, False)
    assert [path.exists() for path in full].count(True) < 5
    # It is looked at again, after others.
    assert await stage.stores.snapshots.superseded(10) == []
    assert await stage.redis.zcard(keys.SNAPSHOTS_SUPERSEDED) == 1


async def test_a_snapshot_that_cannot_be_removed_stops_no_other(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [await stage.save(version, age=9000 - version) for version in range(1, 6)]

    def fails(path: Path) -> None:
        if path == paths[0]:
            raise PermissionError(13, "Permission denied")
        path.rmdir()

    monkeypatch.setattr(snapshot_room, "delete_directory", fails)
    await stage.sweeps.sweep()
    assert [path.exists() for path in paths] == [True, False, True, True, True]


async def test_a_loop_that_samples_its_newest_version_is_never_refused(stage: Stage) -> None:
    for version in range(1, 30):
        await stage.room.check(OWNER, MODEL, version)
        for age, older in enumerate(range(version - 1, 0, -1), start=1):
            await stage.used(older, ago=60.0 * age)
        await stage.save(version, age=0)
    left = [one.version for one in await stage.stores.snapshots.of_model(MODEL)]
    assert sorted(left) == [27, 28, 29]


async def test_who_takes_too_much_of_what_was_just_used_is_refused_until_that_is_older(stage: Stage) -> None:
    paths = [await stage.save(version, age=60) for version in range(1, 4)]
    for _ in range(2):
        with pytest.raises(
            LimitReached, match=r"80 bytes with this one, and may take 60 \(--snapshot-owner-"
        ):
            await stage.room.check(OWNER, MODEL, 4)
    await stage.room.check("bob", "of-bob", 1)
    assert all(path.exists() for path in paths)
    await stage.used(2, ago=130)
    await stage.room.check(OWNER, MODEL, 4)
    assert [path.exists() for path in paths] == [True, False, True]
    assert await stage.stores.snapshots.was_let_go(MODEL, 2)


async def test_what_is_accepted_has_its_place_until_it_is_made_and_once_however_often_it_is_sent(
    stage: Stage,
) -> None:
    await stage.save(1, age=0)
    for version in (2, 3, 3, 3):
        await stage.room.check(OWNER, MODEL, version)
    with pytest.raises(LimitReached):
        await stage.room.check(OWNER, MODEL, 4)
    await stage.save(3, size=5, age=0)
    # The mean is less now: 25 bytes in two, and one of 12 to come.
    await stage.room.check(OWNER, MODEL, 4)


async def test_a_save_that_is_over_or_was_never_accepted_has_no_part_where_another_one_lacks_it(
    stage: Stage,
) -> None:
    await stage.save(1, age=0)
    over, lost, runs, young, mine = 2, 3, 4, 5, 6
    coming = keys.coming_snapshots(OWNER)
    for version in (over, lost, runs, young):
        await stage.stores.snapshots.expect(MODEL, version, OWNER)
    await stage.redis.zadd(
        coming, {f"{MODEL}@{version}": time.time() - 100 for version in (over, lost, runs)}
    )
    await stage.redis.hset(keys.future(MODEL, over), "state", "done")
    await stage.redis.hset(keys.future(MODEL, runs), "state", "pending")
    with pytest.raises(LimitReached):
        # Those that run, and that may just be accepted, have theirs.
        await stage.room.check(OWNER, MODEL, mine)
    left = {f"{MODEL}@{version}".encode() for version in (runs, young)}
    assert set(await stage.redis.zrange(coming, 0, -1)) == left
    await stage.redis.hset(keys.future(MODEL, young), "state", "done")
    assert await stage.room.check(OWNER, MODEL, mine)


async def test_what_cannot_be_removed_for_a_save_has_it_refused(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in range(1, 5):
        await stage.save(version, age=600)

    def fails(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(snapshot_room, "delete_directory", fails)
    with pytest.raises(LimitReached):
        await stage.room.check(OWNER, MODEL, 5)
    assert await stage.stores.snapshots.owners() == {OWNER: 80}


async def test_however_often_a_snapshot_cannot_be_removed_the_log_has_the_first_time(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await stage.save(1, age=0)
    for version in (2, 3, 4):
        await stage.save(version, age=LONG_AGO)

    def fails(path: Path) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(snapshot_room, "delete_directory", fails)
    for _ in range(5):
        await stage.stores.snapshots.supersede(MODEL, 1, time.time() - 1)
        await stage.sweeps.sweep()
    said = sorted(one for one in caplog.messages if "stays for now" in one)
    error = "[Errno 30] Read-only file system"
    assert said == [
        f"a snapshot that is to make room stays for now: 2 of {MODEL}: {error}",
        f"a snapshot that was superseded stays for now: {MODEL}@1: {error}",
    ]
