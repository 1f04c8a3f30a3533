"""Snapshots that no model goes with are deleted, a day after they were first seen."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
import redis.asyncio

from services.common.state import keys
from services.common.storage.data_dir import DataDir
from services.gateway.retention import orphan_sweep
from services.gateway.retention.orphan_sweep import OrphanSweep

DAY = 24 * 3600
KNOWN, LOST = (f"0b0e9f2c-7a55-4c3e-9a43-000000000001:train:{number}" for number in range(2))


class Stage:
    def __init__(self, client: redis.asyncio.Redis, root: Path) -> None:
        self.redis = client
        self.data = DataDir(root)
        self._sweep = OrphanSweep(client, self.data)
        for model_id in (KNOWN, LOST):
            self.data.snapshot(model_id, 3).mkdir(parents=True)

    async def look(self, now: float) -> None:
        await self.look_by(now, now)

    async def look_by(self, now: float, noted: float) -> None:
        await self._sweep.look(now, noted)

    async def know(self, model_id: str) -> None:
        await self.redis.hset(keys.model(model_id), "record", "one that cannot be read")

    def there(self) -> set[str]:
        return {path.name for path in (self.data.root / "snapshots").iterdir()}


@pytest.fixture
async def stage(redis_client: redis.asyncio.Redis, tmp_path: Path) -> Stage:
    stage = Stage(redis_client, tmp_path)
    await stage.know(KNOWN)
    return stage


async def test_snapshots_of_a_model_that_nothing_knows_go_after_a_day(stage: Stage) -> None:
    (stage.data.root / "snapshots" / "not a model").mkdir()
    await stage.look(1000)
    await stage.look(1000 + DAY - 1)
    assert stage.there() == {KNOWN, LOST, "not a model"}
    await stage.look(1000 + DAY)
    assert stage.there() == {KNOWN, "not a model"}
    await stage.look(1000 + DAY)
    assert await stage.redis.exists(keys.ORPHANED_MODELS) == 0


async def test_a_model_that_is_known_again_keeps_its_snapshots(stage: Stage) -> None:
    await stage.look(1000)
    await stage.know(LOST)
    await stage.look(1000 + DAY)
    assert stage.there() == {KNOWN, LOST}
    assert await stage.redis.exists(keys.ORPHANED_MODELS) == 0
    await stage.redis.delete(keys.model(LOST))
    await stage.look(1000 + 2 * DAY)
    assert stage.there() == {KNOWN, LOST}


async def test_a_redis_that_knows_none_of_the_models_has_none_deleted(stage: Stage) -> None:
    await stage.look(1000)
    await stage.redis.delete(keys.model(KNOWN))
    for day in (1, 2, 3):
        await stage.look(1000 + day * DAY)
    assert stage.there() == {KNOWN, LOST}
    await stage.know(KNOWN)
    await stage.look(1000 + 4 * DAY)
    assert stage.there() == {KNOWN, LOST}
    await stage.look(1000 + 5 * DAY)
    assert stage.there() == {KNOWN}


async def test_nothing_goes_by_what_another_redis_knows(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    await stage.look(1000)
    await stage.redis.set(keys.CLUSTER_ID, "another")
    await stage.look(1000 + DAY)
    assert stage.there() == {KNOWN, LOST}
    assert str(stage.data.cluster_id) in caplog.text
    stage.data.cluster_id.unlink()
    await stage.look(1000 + DAY)
    assert stage.there() == {KNOWN}
    assert stage.data.cluster_id.read_text() == "another"


async def test_snapshots_that_cannot_be_deleted_stop_no_others(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = {f"{LOST.rpartition(':')[0]}:{number}" for number in range(2, 6)}
    for model_id in others:
        stage.data.snapshot(model_id, 3).mkdir(parents=True)

    def fails(path: Path) -> None:
        if path.name == LOST:
            raise PermissionError(13, "Permission denied")
        shutil.rmtree(path)

    monkeypatch.setattr(orphan_sweep, "delete_directory", fails)
    await stage.look(1000)
    await stage.look(1000 + DAY)
    assert stage.there() == {KNOWN, LOST}
    monkeypatch.undo()
    await stage.look(1000 + 2 * DAY)
    assert stage.there() == {KNOWN}


async def test_what_a_save_that_broke_off_left_goes_also_of_a_model_that_lives(stage: Stage) -> None:
    broken_off, under_way = (stage.data.snapshots(KNOWN) / name for name in (".4-abandoned", ".5-under-way"))
    for path in (broken_off, under_way):
        path.mkdir()
        (path / "model.safetensors").write_bytes(b"half")
    os.utime(broken_off, (time.time() - 2 * DAY,) * 2)
    await stage.look(1000)
    assert (broken_off.exists(), under_way.exists()) == (False, True)
    assert stage.data.snapshot(KNOWN, 3).is_dir()


async def test_a_day_begins_by_the_later_and_ends_by_the_earlier_of_two_clocks(stage: Stage) -> None:
    await stage.look_by(now=1000 - DAY, noted=1000)
    await stage.look_by(now=1000, noted=1000 + DAY)
    assert LOST in stage.there()
    await stage.look_by(now=1000 + DAY, noted=1000 + DAY)
    assert LOST not in stage.there()
