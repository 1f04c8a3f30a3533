"""Free bytes of a volume are told as long as it answers."""

from __future__ import annotations

import asyncio
import math
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from services.common.contract.errors import StorageAway
from services.common.process.pools import LOOKS, Pool
from services.common.storage.data_dir import DataDir
from services.trainer.files import volume
from services.trainer.files.volume import FreeBytes, Volume


def test_free_bytes_are_told_and_nothing_of_a_volume_that_is_not_there(tmp_path: Path) -> None:
    free = FreeBytes(tmp_path / "data")
    assert math.isnan(free.read())
    (tmp_path / "data").mkdir()
    assert abs(free.read() - shutil.disk_usage(tmp_path).free) < 2**30


def test_a_volume_that_hangs_holds_up_one_thread_and_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volume, "_PATIENCE_S", 0.01)
    asked: list[Path] = []
    answers = threading.Event()

    def ask(directory: Path) -> SimpleNamespace:
        asked.append(directory)
        answers.wait(60)
        return SimpleNamespace(free=7)

    monkeypatch.setattr(shutil, "disk_usage", ask)
    free = FreeBytes(tmp_path)
    assert all(math.isnan(free.read()) for _ in range(5))
    assert asked == [tmp_path]
    monkeypatch.setattr(volume, "_PATIENCE_S", 60.0)
    answers.set()
    assert free.read() == 7


async def test_a_volume_that_hangs_is_away_whatever_the_storage_of_checkpoints_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, goes_on = DataDir(tmp_path / "data"), threading.Event()
    here = Volume(data)
    hanging = [asyncio.create_task(LOOKS.run(goes_on.wait, 60)) for _ in range(40)]
    try:
        await asyncio.wait_for(here.answers(), 30)
        monkeypatch.setattr(volume, "VOLUME_LOOKS", Pool("answer of the data directory", 1, 0.05))
        monkeypatch.setattr(volume, "volume_of", lambda _: goes_on.wait(60))
        with pytest.raises(StorageAway, match="hangs: no answer of the data directory"):
            await here.answers()
    finally:
        goes_on.set()
        await asyncio.gather(*hanging)
