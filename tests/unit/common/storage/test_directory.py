"""Storage in a directory."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from services.common.contract.errors import Cancelled, Internal, StorageFull
from services.common.process import clock
from services.common.storage import directory as directory_module
from services.common.storage.base import Key, Storage, failure
from services.common.storage.directory import DirectoryStorage, publish_directory, reserve
from tests.unit.common.storage import stored
from tests.unit.common.storage.stored import KEY, MODEL, text


@pytest.fixture
def storage(tmp_path: Path) -> DirectoryStorage:
    return DirectoryStorage(tmp_path)


def files_below(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "check", [value for name, value in vars(stored).items() if name.startswith("check_")]
)
def test_it_does_what_storage_does(storage: DirectoryStorage, check: Callable[[Storage], None]) -> None:
    check(storage)


def test_a_sweep_removes_only_what_is_old_enough(storage: DirectoryStorage, tmp_path: Path) -> None:
    storage.publish(KEY, {"x": text("one")})
    storage.publish(Key(MODEL, "weights/b", 1), {"x": text("kept")})
    assert storage.delete(KEY)
    broken_off = tmp_path / MODEL / "weights" / "b" / ".2-abc"
    broken_off.mkdir()
    (broken_off / "half").write_text("...")
    storage.clean(abandoned=1000)
    assert len(files_below(tmp_path)) == 3
    assert storage.delete(KEY, grace=-1) is None
    assert files_below(tmp_path) == {f"{MODEL}/weights/b/1/x", f"{MODEL}/weights/b/.2-abc/half"}
    assert not (tmp_path / MODEL / "weights" / "a").exists()
    os.utime(broken_off, (time.time() - 100_000,) * 2)
    storage.clean()
    assert files_below(tmp_path) == {f"{MODEL}/weights/b/1/x"}


SAVE_WITH_LITTLE_SPACE = f"""
import resource, signal, sys
from pathlib import Path
from services.common.storage.base import Key, failure
from services.common.storage.directory import DirectoryStorage
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
storage = DirectoryStorage(Path(sys.argv[1]))
try:
    storage.publish(Key("{MODEL}", "weights/a", 4), {{"x": lambda path: path.write_bytes(bytes(200_000))}})
except OSError as error:
    print(failure(error, "checkpoint a").code)
"""


def test_a_real_write_that_finds_no_space_loses_nothing(storage: DirectoryStorage, tmp_path: Path) -> None:
    storage.publish(KEY, {"x": text("kept")})
    command = [sys.executable, "-c", SAVE_WITH_LITTLE_SPACE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "storage_full\n", done.stderr
    assert storage.versions(MODEL, "weights/a") == [3]
    assert files_below(tmp_path) == {f"{KEY.path}/x"}
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


class Volume(NamedTuple):
    """What `shutil.disk_usage` says."""

    total: int
    used: int
    free: int


def test_a_nearly_full_volume_takes_no_saves_and_still_takes_what_keeps_work_safe(
    storage: DirectoryStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nearly = Volume(100 << 30, (100 << 30) - (1 << 29), 1 << 29)
    monkeypatch.setattr("services.common.storage.directory.shutil.disk_usage", lambda _: nearly)
    with pytest.raises(OSError, match="only 536870912 bytes"):
        storage.publish(KEY, {"x": text("one")})
    assert isinstance(failure(OSError(28, "only 1 byte"), "x"), StorageFull)
    assert files_below(tmp_path) == set()
    assert publish_directory(tmp_path / "state", {"x": text("one")}, replace=False) == 3


def test_the_reserve_of_a_volume_is_a_fiftieth_at_most_a_gibibyte() -> None:
    assert (reserve(1000), reserve(1 << 50)) == (20, 1 << 30)


def test_a_full_storage_is_told_from_other_failures() -> None:
    full = failure(OSError(28, "No space left on device"), "checkpoint a")
    assert isinstance(full, StorageFull)
    assert (full.category, full.code) == ("server", "storage_full")
    assert "save again" in full.message
    assert isinstance(failure(OSError("An error occurred (XMinioStorageFull)"), "x"), StorageFull)
    assert isinstance(failure(PermissionError(13, "Permission denied"), "x"), Internal)


def test_where_nothing_can_be_linked_a_copy_ends_between_two_pieces_of_a_file(
    storage: DirectoryStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(source: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", no_links)
    monkeypatch.setattr(directory_module, "_PIECE", 4)
    storage.publish(KEY, {"x": text("twelve bytes")})
    copy = Key("t:train:0", "weights/a", 3)
    asked = itertools.count(1)

    def go_on() -> None:
        if next(asked) == 3:
            raise Cancelled("given up")

    with pytest.raises(Cancelled):
        storage.copy(KEY, copy, go_on)
    assert files_below(tmp_path) == {f"{KEY.path}/x"}
    assert storage.copy(KEY, copy, go_on) == 12
    assert (tmp_path / copy.path / "x").read_text() == "twelve bytes"


def test_what_is_deleted_goes_an_hour_later_by_the_later_of_two_clocks(
    storage: DirectoryStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.publish(KEY, {"x": text("kept")})
    monkeypatch.setattr(clock, "to_note", lambda: time.time() + 7200)
    left = storage.delete(KEY)
    assert left is not None and left > 7200
