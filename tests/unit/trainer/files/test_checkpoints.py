"""Training state on disk."""

from __future__ import annotations

import errno
import os
import shutil
from functools import partial
from pathlib import Path

import pytest

from services.common.contract.errors import (
    DataLoss,
    Internal,
    InvalidRequest,
    NotFound,
    StorageAway,
    StorageFull,
)
from services.common.storage.base import Key
from services.common.storage.data_dir import DataDir
from services.common.storage.directory import DirectoryStorage, publish_directory
from services.trainer.compute.data import ModelState, ShardedState
from services.trainer.files.base import Base
from services.trainer.files.checkpoints import CheckpointStore, read_state
from services.trainer.files.volume import Volume, identified

MODEL = "s:train:0"


KEY = Key(MODEL, "weights/a", 5)


@pytest.fixture
def storage(tmp_path: Path) -> DirectoryStorage:
    return DirectoryStorage(tmp_path)


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    return tmp_path / "staging"


@pytest.fixture
def store(storage: DirectoryStorage, staging: Path) -> CheckpointStore:
    return CheckpointStore(storage, Base("org/base", "/models/base"), staging)


def test_what_is_loaded_is_what_was_saved(store: CheckpointStore, model_state: ModelState) -> None:
    store.save(MODEL, 5, "weights/a", False, model_state)
    loaded = store.load(MODEL, "weights/a")
    assert loaded.state == model_state
    assert (loaded.meta.seq_id, loaded.meta.base_model) == (5, "org/base")


def test_an_accepted_load_is_repeated_from_what_its_owner_has_deleted_since(
    store: CheckpointStore, storage: DirectoryStorage, model_state: ModelState
) -> None:
    store.save(MODEL, 5, "weights/a", False, model_state)
    storage.delete(KEY)
    assert store.load(MODEL, "weights/a", version=5).state == model_state
    assert store.find(MODEL, "weights/a", version=5).meta.lora == model_state.lora
    storage.delete(KEY, grace=-1)
    with pytest.raises(NotFound):
        store.load(MODEL, "weights/a", version=5)


@pytest.mark.parametrize("method", ["find", "load"])
def test_of_a_checkpoint_that_was_deleted_there_is_no_newest(
    store: CheckpointStore, storage: DirectoryStorage, model_state: ModelState, method: str
) -> None:
    store.save(MODEL, 5, "weights/a", False, model_state)
    storage.delete(KEY)
    with pytest.raises(NotFound, match="weights/a does not exist"):
        getattr(store, method)(MODEL, "weights/a")


def test_what_is_found_is_the_version_that_is_loaded_without_its_tensors(
    store: CheckpointStore, model_state: ModelState, tmp_path: Path
) -> None:
    store.save(MODEL, 5, "weights/a", False, model_state)
    store.save(MODEL, 7, "weights/a", True, model_state)
    (tmp_path / MODEL / "weights/a/7/adapter.safetensors").unlink()
    found = store.find(MODEL, "weights/a")
    assert (found.version, found.meta.seq_id, found.meta.lora) == (7, 7, model_state.lora)


def test_a_storage_below_a_volume_that_went_away_is_away_and_has_lost_nothing(
    tmp_path: Path, staging: Path, model_state: ModelState
) -> None:
    mounted = tmp_path / "mounted"
    data = DataDir(mounted)
    base = Base("org/base", "/models/base")
    store = CheckpointStore(DirectoryStorage(data.checkpoints), base, staging, Volume(data).check)
    store.look(MODEL, "weights/a")
    store.save(MODEL, 5, "weights/a", False, model_state)
    mounted.rename(tmp_path / "away")
    for make_it in (lambda: None, mounted.mkdir, partial(identified, data)):
        make_it()
        with pytest.raises(StorageAway, match="mount that one there again"):
            store.look(MODEL, "weights/a")
    shutil.rmtree(mounted)
    (tmp_path / "away").rename(mounted)
    store.look(MODEL, "weights/a")


def test_a_checkpoint_that_was_saved_below_a_volume_that_went_meanwhile_is_not_acknowledged(
    tmp_path: Path, staging: Path, model_state: ModelState
) -> None:
    data = DataDir(tmp_path)
    storage, base = DirectoryStorage(data.checkpoints), Base("org/base", "/models/base")
    store = CheckpointStore(storage, base, staging, Volume(data).check)
    store.look(MODEL, "weights/a")
    data.volume_id.unlink()
    with pytest.raises(StorageAway, match="mount that one there again"):
        store.save(MODEL, 5, "weights/a", False, model_state)


def test_files_are_safetensors_and_json_only(
    store: CheckpointStore, storage: DirectoryStorage, model_state: ModelState
) -> None:
    size = store.save(MODEL, 5, "weights/a", False, model_state)
    files = storage.files(KEY)
    assert files is not None and sum(files.values()) == size
    assert sorted(files) == ["adapter.safetensors", "meta.json", "optimizer.safetensors"]


def test_a_repeat_of_the_same_operation_changes_nothing(
    store: CheckpointStore, model_state: ModelState
) -> None:
    size = store.save(MODEL, 5, "weights/a", False, model_state)
    other = ModelState(model_state.lora, {}, {}, 0)
    assert store.save(MODEL, 5, "weights/a", False, other) == size
    assert store.load(MODEL, "weights/a").state == model_state


def test_a_replay_does_not_undo_a_later_overwrite(store: CheckpointStore, model_state: ModelState) -> None:
    later = ModelState(model_state.lora, model_state.adapter, {}, 0)
    store.save(MODEL, 9, "weights/a", True, later)
    store.save(MODEL, 5, "weights/a", True, model_state)
    assert store.load(MODEL, "weights/a").state == later


def test_a_taken_name_needs_overwrite(store: CheckpointStore, model_state: ModelState) -> None:
    store.save(MODEL, 5, "weights/a", False, model_state)
    with pytest.raises(InvalidRequest, match="overwrite"):
        store.save(MODEL, 6, "weights/a", False, model_state)
    later = ModelState(model_state.lora, model_state.adapter, {}, 0)
    store.save(MODEL, 7, "weights/a", True, later)
    assert store.load(MODEL, "weights/a").state == later
    assert store.load(MODEL, "weights/a", version=5).state == model_state


def test_an_export_does_not_replace_another(store: CheckpointStore) -> None:
    files = {"a": lambda path: path.write_text("one")}
    assert store.export(MODEL, 5, "external_weights/e", lambda: files) == 3
    with pytest.raises(InvalidRequest, match="exists"):
        store.export(MODEL, 6, "external_weights/e", lambda: files)


def test_a_save_that_finds_no_space_fails_as_such_and_loses_nothing(
    store: CheckpointStore, model_state: ModelState, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(MODEL, 5, "weights/a", False, model_state)

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(StorageFull, match="save again") as caught:
        store.export(MODEL, 6, "external_weights/e", lambda: {"a": full})
    assert (caught.value.category, caught.value.code) == ("server", "storage_full")
    monkeypatch.setattr("services.trainer.files.checkpoints.state_files", lambda _: {"a": full})
    with pytest.raises(StorageFull):
        store.save(MODEL, 7, "weights/a", True, model_state)
    monkeypatch.undo()
    assert store.load(MODEL, "weights/a").meta.seq_id == 5
    later = ModelState(model_state.lora, model_state.adapter, {}, 0)
    store.save(MODEL, 8, "weights/a", True, later)
    assert store.load(MODEL, "weights/a").state == later


@pytest.mark.parametrize(
    ("number", "waits"), [(errno.EACCES, False), (errno.EROFS, False), (errno.EIO, True)]
)
def test_a_save_that_the_storage_refuses_each_time_is_not_waited_for(
    store: CheckpointStore,
    storage: DirectoryStorage,
    model_state: ModelState,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    waits: bool,
) -> None:
    def refuses(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(storage, "publish", refuses)
    with pytest.raises(StorageAway if waits else Internal, match=os.strerror(number)):
        store.save(MODEL, 5, "weights/a", False, model_state)


def test_a_load_that_finds_no_space_on_its_way_names_the_disk_and_is_not_waited_for(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "ranks"
    directory.mkdir()
    (directory / "0.safetensors").write_text("...")
    store.save(MODEL, 5, "weights/a", False, ShardedState(str(directory), 3))

    def full(source: str, target: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.link", full)
    with pytest.raises(StorageFull, match=r"not loaded: no space left on the disk of .*staging") as caught:
        store.load(MODEL, "weights/a")
    assert "free space there, then load it again" in caught.value.message


def test_a_missing_checkpoint_is_the_users_error(store: CheckpointStore) -> None:
    with pytest.raises(NotFound, match=r"tinker://s:train:0/weights/none"):
        store.load(MODEL, "weights/none")
    with pytest.raises(NotFound, match=r"tinker://s:train:0/weights/none"):
        store.load(MODEL, "weights/none", version=3)


@pytest.mark.parametrize("method", ["find", "load"])
def test_a_checkpoint_of_another_base_model_is_refused(
    store: CheckpointStore, storage: DirectoryStorage, staging: Path, model_state: ModelState, method: str
) -> None:
    other = CheckpointStore(storage, Base("org/other", "/models/other"), staging)
    other.save(MODEL, 1, "weights/a", False, model_state)
    with pytest.raises(InvalidRequest, match="org/other"):
        getattr(store, method)(MODEL, "weights/a")


@pytest.mark.parametrize(
    ("saved_as", "loaded_as"),
    [
        (Base("org/base", "/models/base"), Base("org/alias", "/models/base")),
        (Base("org/base", "org/base"), Base("alias", "/cache/models--org--base/snapshots/ab12")),
        (Base("org/base", "/old/disk"), Base("org/base", "/new/disk")),
    ],
)
def test_a_checkpoint_goes_on_under_another_name_of_the_same_weights(
    storage: DirectoryStorage, staging: Path, model_state: ModelState, saved_as: Base, loaded_as: Base
) -> None:
    CheckpointStore(storage, saved_as, staging).save(MODEL, 1, "weights/a", False, model_state)
    assert CheckpointStore(storage, loaded_as, staging).load(MODEL, "weights/a").state == model_state


def test_files_of_the_ranks_come_back_as_files_that_stay_until_they_are_released(
    store: CheckpointStore, storage: DirectoryStorage, tmp_path: Path, staging: Path
) -> None:
    written = tmp_path / "written"
    written.mkdir()
    for rank in "ab":
        (written / f"{rank}.safetensors").write_text(rank)
    store.save(MODEL, 5, "weights/a", False, ShardedState(str(written), 7))
    loaded = store.load(MODEL, "weights/a")
    assert isinstance(loaded.state, ShardedState)
    assert (loaded.state.step, loaded.meta.lora) == (7, None)
    assert storage.delete(KEY, grace=0.0) is None
    files = {path.name: path.read_text() for path in Path(loaded.state.directory).glob("*.safetensors")}
    assert files == {"a.safetensors": "a", "b.safetensors": "b"}
    loaded.release()
    assert list(staging.iterdir()) == []


@pytest.mark.parametrize("name", ["adapter.safetensors", "optimizer.safetensors", "meta.json"])
def test_damage_is_noticed(
    store: CheckpointStore, model_state: ModelState, tmp_path: Path, name: str
) -> None:
    store.save(MODEL, 5, "weights/a", False, model_state)
    path = tmp_path / KEY.path / name
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataLoss, match="tinker://s:train:0/weights/a"):
        store.load(MODEL, "weights/a")


@pytest.mark.parametrize("damage", [(b"org", b"o\xffg"), (b'"step": ', b'"step": -'), (b"{", b"[")])
def test_a_description_that_makes_no_sense_is_noticed(
    store: CheckpointStore, model_state: ModelState, tmp_path: Path, damage: tuple[bytes, bytes]
) -> None:
    store.save(MODEL, 5, "weights/a", False, model_state)
    path = tmp_path / KEY.path / "meta.json"
    path.write_bytes(path.read_bytes().replace(*damage, 1))
    with pytest.raises(DataLoss, match=r"meta.json in .* is damaged"):
        store.load(MODEL, "weights/a")


def test_an_incomplete_directory_is_not_a_state(
    store: CheckpointStore, model_state: ModelState, tmp_path: Path, staging: Path
) -> None:
    store.save(MODEL, 5, "weights/a", False, model_state)
    directory = tmp_path / KEY.path
    (directory / "optimizer.safetensors").unlink()
    with pytest.raises(DataLoss):
        read_state(directory, staging)
    assert read_state(tmp_path / "nothing", staging) is None


def test_a_failed_publish_leaves_the_old_directory_and_no_litter(tmp_path: Path) -> None:
    target = tmp_path / "here"
    publish_directory(target, {"a": lambda path: path.write_text("old")}, replace=False)

    def fail(path: Path) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        publish_directory(target, {"a": lambda path: path.write_text("new"), "b": fail}, replace=True)
    assert (target / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def test_a_directory_is_replaced_whole(tmp_path: Path) -> None:
    target = tmp_path / "here"
    publish_directory(target, {"a": lambda path: path.write_text("old")}, replace=False)
    with pytest.raises(FileExistsError):
        publish_directory(target, {"b": lambda path: path.write_text("new")}, replace=False)
    publish_directory(target, {"b": lambda path: path.write_text("new")}, replace=True)
    assert [path.name for path in target.iterdir()] == ["b"]
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
