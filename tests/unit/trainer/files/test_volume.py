"""Free bytes of a volume are told as long as it answers."""

from __future__ import annotations

import math
import shutil
import threading
from pathlib import Path

import pytest

from services.trainer.files import volume
from services.trainer.files.volume import FreeBytes


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

    def ask(directory: Path) -> int:
        asked.append(directory)
        answers.wait(60)
        return 7

    free = FreeBytes(tmp_path, ask)
    assert all(math.isnan(free.read()) for _ in range(5))
    assert asked == [tmp_path]
    monkeypatch.setattr(volume, "_PATIENCE_S", 60.0)
    answers.set()
    assert free.read() == 7
