"""Storage in an object store, here one in memory."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from services.common.contract.errors import DataLoss, InvalidRequest, StorageFull
from services.common.storage.base import Key, LocalDiskFull, Storage, failure
from services.common.storage.data_dir import DataDir
from services.common.storage.directory import DirectoryStorage
from services.common.storage.location import check_location, connect
from services.common.storage.object_store import ObjectStorage
from tests.unit.common.storage import stored
from tests.unit.common.storage.stored import KEY, MODEL, text


@pytest.fixture
def filesystem() -> Iterator[MemoryFileSystem]:
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield fsspec.filesystem("memory")
    MemoryFileSystem.store.clear()


@pytest.fixture
def storage(tmp_path: Path, filesystem: MemoryFileSystem) -> Storage:
    return connect("memory://bucket/tinsmith", DataDir(tmp_path))


def objects(filesystem: MemoryFileSystem) -> list[str]:
    return sorted(filesystem.find("/bucket"))


@pytest.mark.parametrize(
    "check", [value for name, value in vars(stored).items() if name.startswith("check_")]
)
def test_it_does_what_storage_does(
    storage: Storage, tmp_path: Path, check: Callable[[Storage], None]
) -> None:
    check(storage)
    assert list((tmp_path / "staging").iterdir()) == []


def test_a_version_whose_manifest_is_missing_does_not_exist(
    storage: Storage, filesystem: MemoryFileSystem
) -> None:
    storage.publish(KEY, {"x": text("one")})
    filesystem.rm_file(f"/bucket/tinsmith/{KEY.path}/manifest.json")
    assert storage.versions(MODEL, "weights/a") == []
    assert storage.files(KEY) is None
    storage.clean()
    assert len(objects(filesystem)) == 1
    storage.clean(abandoned=-1)
    assert objects(filesystem) == []


def test_a_sweep_keeps_what_a_manifest_names_and_removes_the_rest(
    storage: Storage, filesystem: MemoryFileSystem
) -> None:
    storage.publish(KEY, {"x": text("one"), "y": text("two")})
    before = objects(filesystem)
    filesystem.pipe_file(f"/bucket/tinsmith/{KEY.path}/0123abcd/x", b"of a save that broke off")
    storage.clean()
    assert len(objects(filesystem)) == 4
    storage.clean(abandoned=-1)
    assert objects(filesystem) == before
    assert storage.delete(KEY)
    storage.clean(abandoned=-1)
    assert len(objects(filesystem)) == 4
    assert storage.delete(KEY, grace=-1) is None
    assert objects(filesystem) == []


def test_what_is_not_a_version_is_left_alone(storage: Storage, filesystem: MemoryFileSystem) -> None:
    storage.publish(KEY, {"x": text("one")})
    foreign = ("README", f"{MODEL}/notes", f"{MODEL}/weights/a/notes/x")
    for name in foreign:
        filesystem.pipe_file(f"/bucket/tinsmith/{name}", b"of somebody else")
    storage.clean(abandoned=-1)
    assert len(objects(filesystem)) == 2 + len(foreign)


def test_files_on_the_way_of_a_process_that_was_killed_are_removed(storage: Storage, tmp_path: Path) -> None:
    left = tmp_path / "staging" / "tmpabc"
    left.mkdir(parents=True)
    (left / "half").write_text("...")
    storage.clean()
    assert left.exists()
    storage.clean(abandoned=-1)
    assert not left.exists()


class FullFileSystem(MemoryFileSystem):
    """Takes small objects only."""

    cachable = False

    def put_file(self, lpath: str, rpath: str, **options: object) -> None:
        if Path(lpath).stat().st_size > 100:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().put_file(lpath, rpath, **options)


def test_an_upload_that_finds_no_space_leaves_nothing_behind(
    tmp_path: Path, filesystem: MemoryFileSystem
) -> None:
    storage = ObjectStorage(FullFileSystem(), "/bucket/tinsmith", tmp_path)
    storage.publish(KEY, {"x": text("kept")})
    before = objects(filesystem)
    with pytest.raises(OSError, match="No space left"):
        storage.publish(Key(MODEL, "weights/a", 4), {"x": text("small"), "y": text("large" * 100)})
    assert objects(filesystem) == before
    assert list(tmp_path.iterdir()) == []


def test_a_failing_client_library_is_an_error_of_the_operating_systems_kind(tmp_path: Path) -> None:
    class Broken(MemoryFileSystem):
        cachable = False

        def cat_file(self, path: str, **options: object) -> bytes:
            raise RuntimeError("connection reset")

    with pytest.raises(OSError, match="connection reset"):
        ObjectStorage(Broken(), "/bucket", tmp_path).files(KEY)


def damage(filesystem: MemoryFileSystem, key: Key) -> None:
    filesystem.pipe_file(f"/bucket/tinsmith/{key.path}/manifest.json", b'{"prefix": "x", "fil')


def test_a_version_whose_manifest_is_damaged_is_there_and_cannot_be_read(
    storage: Storage, filesystem: MemoryFileSystem
) -> None:
    storage.publish(KEY, {"x": text("one")})
    damage(filesystem, KEY)
    assert storage.versions(MODEL, "weights/a") == [KEY.version]
    told = rf"^{MODEL}/weights/a/{KEY.version}/manifest.json is damaged"
    with pytest.raises(DataLoss, match=told):
        storage.files(KEY)
    with pytest.raises(DataLoss, match=told):
        storage.open(KEY, "x")
    with pytest.raises(DataLoss, match=told), storage.local(KEY):
        pass
    with pytest.raises(DataLoss, match=told):
        storage.copy(KEY, Key(MODEL, "weights/b", 1))


def test_a_sweep_goes_on_past_a_manifest_that_is_damaged(
    storage: Storage, filesystem: MemoryFileSystem
) -> None:
    other = Key(MODEL, "weights/z", 9)
    for key in (KEY, other):
        storage.publish(key, {"x": text("one")})
        filesystem.pipe_file(f"/bucket/tinsmith/{key.path}/0123abcd/x", b"of a save that broke off")
    damage(filesystem, KEY)
    storage.clean(abandoned=-1)
    left = objects(filesystem)
    assert [KEY.path in name for name in left].count(True) == 3, "what it has named is known by nobody"
    assert [other.path in name for name in left].count(True) == 2


def test_a_version_whose_manifest_is_damaged_can_be_deleted_and_saved_again(
    storage: Storage, filesystem: MemoryFileSystem
) -> None:
    storage.publish(KEY, {"x": text("one")})
    damage(filesystem, KEY)
    assert storage.publish(KEY, {"x": text("once more")}) == 9
    assert storage.files(KEY) == {"x": 9}
    damage(filesystem, KEY)
    assert storage.delete(KEY)
    assert storage.versions(MODEL, "weights/a") == []
    assert storage.delete(KEY, grace=-1) is None
    assert objects(filesystem) == []


def test_a_version_that_lacks_a_file_is_damaged_and_not_away(
    storage: Storage, filesystem: MemoryFileSystem
) -> None:
    storage.publish(KEY, {"x": text("one")})
    filesystem.rm_file(next(name for name in objects(filesystem) if name.endswith("/x")))
    with pytest.raises(DataLoss, match="lacks its file x"), storage.local(KEY):
        pass


def test_of_a_version_only_those_files_come_here_that_are_wanted(
    storage: Storage, filesystem: MemoryFileSystem
) -> None:
    storage.publish(KEY, {"x": text("one"), "y": text("large")})
    storage.delete(KEY)
    with storage.local(KEY, ["x", "z"]) as directory:
        assert directory is not None and [path.name for path in directory.iterdir()] == ["x"]


class OnFullDisk(MemoryFileSystem):
    """Its objects come to a disk without space."""

    cachable = False

    def get_file(self, rpath: str, lpath: str, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_of_this_machine_is_told_from_a_full_storage_and_named(
    tmp_path: Path, filesystem: MemoryFileSystem
) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    storage = ObjectStorage(OnFullDisk(), "/bucket/tinsmith", tmp_path)
    with pytest.raises(LocalDiskFull, match=f"disk of {tmp_path} on ") as caught:
        storage.publish(KEY, {"x": full})
    told = failure(caught.value, "checkpoint a")
    assert isinstance(told, StorageFull)
    assert f"no space left on the disk of {tmp_path} on" in told.message
    assert "free space there, then save again" in told.message
    storage.publish(KEY, {"x": text("one")})
    with pytest.raises(LocalDiskFull, match=f"disk of {tmp_path} on "), storage.local(KEY):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_location_is_a_directory_or_a_url_without_secrets(tmp_path: Path) -> None:
    assert isinstance(connect("", DataDir(tmp_path)), DirectoryStorage)
    assert isinstance(connect(str(tmp_path), DataDir(tmp_path)), DirectoryStorage)
    assert check_location("s3://bucket/prefix") == "s3://bucket/prefix"
    for wrong in (
        "relative/path",
        "s3://key:secret@bucket/x",
        "file:///tmp/x",
        "s3:///x",
        "s3://b/x?secret=1",
    ):
        with pytest.raises(InvalidRequest):
            check_location(wrong)
    with pytest.raises(InvalidRequest, match="nothing"):
        connect("nothing://bucket/x", DataDir(tmp_path))


@pytest.mark.parametrize(
    ("model", "checkpoint"),
    [
        ("../x", "weights/a"),
        (MODEL, "weights/../../a"),
        (MODEL, "weights/.a"),
        (MODEL, "other/a"),
        ("a/b", "a"),
    ],
)
def test_no_name_leads_out_of_the_storage(model: str, checkpoint: str) -> None:
    with pytest.raises(InvalidRequest):
        Key(model, checkpoint, 1)
    with pytest.raises(InvalidRequest):
        Key(MODEL, "weights/a", -1)
