"""What every kind of storage must do, as functions that tests of each kind call."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from services.common.contract.errors import Cancelled
from services.common.storage.base import Key, Storage

MODEL = "s:train:0"
KEY = Key(MODEL, "weights/a", 3)
BIG = bytes(range(256)) * 40_000


def text(value: str) -> object:
    return lambda path: path.write_text(value)


def fail(path: Path) -> None:
    path.write_bytes(b"some of it")
    raise OSError(errno.ENOSPC, "No space left on device")


FILES = {"meta.json": text("{}"), "weights.bin": lambda path: path.write_bytes(BIG)}
SIZES = {"meta.json": 2, "weights.bin": len(BIG)}


def check_what_was_stored_is_found(storage: Storage) -> None:
    assert storage.files(KEY) is None
    assert storage.versions(MODEL, "weights/a") == []
    assert storage.publish(KEY, FILES) == sum(SIZES.values())
    assert storage.files(KEY) == SIZES
    with storage.open(KEY, "weights.bin") as file:
        assert file.read(1000) == BIG[:1000]
        assert file.read() == BIG[1000:]
    with storage.local(KEY) as directory:
        assert directory is not None
        assert {path.name: path.stat().st_size for path in directory.iterdir()} == SIZES
        assert (directory / "weights.bin").read_bytes() == BIG
    with storage.local(Key(MODEL, "weights/b", 3)) as directory:
        assert directory is None
    for name in ("nothing", "../3/meta.json", "manifest.json"):
        with pytest.raises(FileNotFoundError):
            storage.open(KEY, name)


def check_versions_stand_side_by_side(storage: Storage) -> None:
    storage.publish(Key(MODEL, "weights/a", 11), {"x": text("new")})
    storage.publish(Key(MODEL, "weights/a", 9), {"x": text("old")})
    storage.publish(Key(MODEL, "weights/other", 10), {"x": text("other")})
    assert storage.versions(MODEL, "weights/a") == [9, 11]
    storage.delete(Key(MODEL, "weights/a", 9))
    storage.delete(Key(MODEL, "weights/a", 9))
    assert storage.versions(MODEL, "weights/a") == [11]
    with storage.open(Key(MODEL, "weights/a", 11), "x") as file:
        assert file.read() == b"new"


def check_a_repeat_changes_nothing(storage: Storage) -> None:
    storage.publish(KEY, {"x": text("first")})
    assert storage.publish(KEY, {"x": text("another one")}) == 5
    with storage.open(KEY, "x") as file:
        assert file.read() == b"first"


def check_a_failed_save_is_not_found_and_loses_nothing(storage: Storage) -> None:
    storage.publish(KEY, {"x": text("kept")})
    with pytest.raises(OSError, match=r"(?i)no space left"):
        storage.publish(Key(MODEL, "weights/a", 4), {"x": text("new"), "y": fail})
    assert storage.versions(MODEL, "weights/a") == [3]
    with storage.open(KEY, "x") as file:
        assert file.read() == b"kept"
    assert storage.publish(Key(MODEL, "weights/a", 4), {"x": text("again")}) == 5


def check_a_deleted_version_can_be_read_to_its_end(storage: Storage) -> None:
    other = Key(MODEL, "weights/a", 4)
    storage.publish(KEY, FILES)
    storage.publish(other, FILES)
    with storage.open(KEY, "weights.bin") as file, storage.local(other) as directory:
        assert file.read(1000) == BIG[:1000]
        storage.delete(KEY)
        storage.delete(other)
        assert storage.files(KEY) is None
        assert storage.versions(MODEL, "weights/a") == []
        with pytest.raises(FileNotFoundError):
            storage.open(KEY, "weights.bin")
        # Within the grace period another call takes nothing away.
        assert 3000 < (storage.delete(KEY) or 0) <= 3600
        storage.clean()
        assert file.read() == BIG[1000:]
        assert directory is not None
        assert (directory / "weights.bin").read_bytes() == BIG
    assert storage.delete(KEY, grace=-1) is None
    assert storage.delete(KEY, grace=-1) is None
    # The name is free at once.
    storage.publish(Key(MODEL, "weights/a", 8), {"x": text("next")})
    assert storage.versions(MODEL, "weights/a") == [8]


def check_what_was_deleted_is_read_by_its_version_until_its_files_go(storage: Storage) -> None:
    storage.publish(KEY, FILES)
    storage.delete(KEY)
    # As after a deletion that broke off, and one that is repeated.
    storage.delete(KEY)
    storage.clean(abandoned=-1)
    assert storage.copy(KEY, Key("t:train:0", "weights/a", 3)) is None
    with storage.local(KEY) as directory:
        assert directory is not None
        assert {path.name: path.stat().st_size for path in directory.iterdir()} == SIZES
    assert storage.delete(KEY, grace=-1) is None
    with storage.local(KEY) as directory:
        assert directory is None


def check_a_copy_that_is_given_up_ends_between_two_files(storage: Storage) -> None:
    copy = Key("t:train:0", "weights/a", 3)
    storage.publish(KEY, FILES)
    asked: list[int] = []

    def go_on() -> None:
        asked.append(1)
        if len(asked) == 2:
            raise Cancelled("given up")

    with pytest.raises(Cancelled):
        storage.copy(KEY, copy, go_on)
    assert storage.files(copy) is None
    assert len(asked) == 2
    assert storage.copy(KEY, copy, go_on) == sum(SIZES.values())


def check_a_copy_has_a_life_of_its_own(storage: Storage) -> None:
    copy = Key("t:train:0", "weights/a", 3)
    assert storage.copy(KEY, copy) is None and storage.files(copy) is None
    storage.publish(KEY, FILES)
    for _ in range(2):
        assert storage.copy(KEY, copy) == sum(SIZES.values())
    assert storage.delete(KEY, grace=-1) is None
    assert storage.files(KEY) is None and storage.files(copy) == SIZES
    with storage.open(copy, "weights.bin") as file:
        assert file.read() == BIG
    assert storage.delete(copy, grace=-1) is None
    assert storage.files(copy) is None
