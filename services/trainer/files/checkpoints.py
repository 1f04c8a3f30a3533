"""Training state on disk: named checkpoints, and the format they share with durable snapshots.

A saved state is a directory of adapter.safetensors, optimizer.safetensors and meta.json; of a model that
trains all weights it has the files of every rank instead (`compute/full/shards.py`). Invariant: it holds all
that a model needs to go on as if it had never stopped, and only tensors and JSON.
"""

from __future__ import annotations

import errno
import json
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from services.common.contract import ids
from services.common.contract.errors import (
    DataLoss,
    InvalidRequest,
    NotFound,
    StorageAway,
    StorageFull,
    TinsmithError,
)
from services.common.storage.base import Key, LocalDiskFull, Storage, Writer, failure, on_local_disk
from services.common.storage.directory import linked_files
from services.trainer.compute.data import LoraSpec, ModelState, ShardedState
from services.trainer.files.base import Base
from services.trainer.files.tensor_files import load_tensors, save_tensors, save_text

_ADAPTER, _OPTIMIZER, _META = "adapter.safetensors", "optimizer.safetensors", "meta.json"

_LASTING = (errno.EROFS, errno.ENAMETOOLONG)
"""What a storage refuses again each time, beside what it does not permit."""

T = TypeVar("T")

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]

Files = Callable[[], Mapping[str, Writer]]
"""Makes the files of an export. Blocking."""


class Meta(msgspec.Struct, frozen=True):
    """What meta.json says.

    Attributes:
        base_model: the name that its base is registered under.
        weights: what those weights are, as `weights_of`: another name of them goes on from this state.
        seq_id: the operation after which the state was taken.
        lora: None = the model trains all weights.
    """

    base_model: str
    weights: str
    model_id: str
    seq_id: _Count
    step: _Count
    lora: LoraSpec | None


@dataclass(frozen=True)
class Found:
    """A checkpoint that is there, without its tensors.

    Attributes:
        version: its number, with which it is found also once it was deleted, for as long as its files stay.
    """

    version: int
    meta: Meta


@dataclass(frozen=True)
class SavedState:
    """A saved state in memory, or in files of its own until `release`."""

    meta: Meta
    state: ModelState | ShardedState

    def release(self) -> None:
        """Deletes the files of a sharded state. Blocking."""
        if isinstance(self.state, ShardedState):
            shutil.rmtree(self.state.directory, ignore_errors=True)


def state_files(saved: SavedState) -> dict[str, Writer]:
    """The files of a saved state."""
    meta = json.dumps(msgspec.to_builtins(saved.meta), indent=2)
    if isinstance(saved.state, ShardedState):
        return {**linked_files(Path(saved.state.directory)), _META: save_text(meta + "\n")}
    return {
        _ADAPTER: save_tensors(saved.state.adapter),
        _OPTIMIZER: save_tensors(saved.state.optimizer),
        _META: save_text(meta + "\n"),
    }


def read_meta(directory: Path) -> Meta | None:
    """Meta of a saved state; None when there is no such directory.

    Raises:
        DataLoss: meta.json is damaged.
    """
    try:
        return msgspec.json.decode((directory / _META).read_bytes(), type=Meta)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataLoss(f"{_META} in {directory.name} is damaged: {error}") from error


def read_state(directory: Path, staging: Path) -> SavedState | None:
    """The saved state in a directory; None when there is no such directory.

    Args:
        staging: where files of a sharded state are linked or copied to, for all ranks to read.

    Raises:
        DataLoss: a file is missing or damaged.
    """
    meta = read_meta(directory)
    if meta is None:
        return None
    try:
        if meta.lora is None:
            return SavedState(meta, ShardedState(str(_staged(directory, staging)), meta.step))
        adapter, optimizer = load_tensors(directory / _ADAPTER), load_tensors(directory / _OPTIMIZER)
    except FileNotFoundError as error:
        raise DataLoss(f"saved state {directory.name} is incomplete: {error}") from error
    return SavedState(meta, ModelState(meta.lora, adapter, optimizer, meta.step))


def _staged(directory: Path, staging: Path) -> Path:
    """A directory with the files of another one, however soon that goes."""
    with on_local_disk(staging):
        staging.mkdir(parents=True, exist_ok=True)
        target = Path(tempfile.mkdtemp(dir=staging))
        try:
            for name, link in linked_files(directory).items():
                link(target / name)
        except BaseException:
            shutil.rmtree(target, ignore_errors=True)
            raise
    return target


def _not_saved(error: OSError, path: str) -> TinsmithError:
    """Why a checkpoint was not saved: for a reason that passes by itself, or for one that does not."""
    reason = failure(error, f"checkpoint {path}")
    if isinstance(reason, StorageFull) or isinstance(error, PermissionError) or error.errno in _LASTING:
        return reason
    return StorageAway(f"checkpoint {path} cannot be saved at present: {error}")


class CheckpointStore:
    """Named checkpoints and exports of one base model's models. Blocking; call from a thread.

    Args:
        staging: as of `read_state`.
        check_same: raises StorageAway when the storage is not the one any more that it was.
    """

    def __init__(
        self, storage: Storage, base: Base, staging: Path, check_same: Callable[[], None] = lambda: None
    ) -> None:
        self._storage = storage
        self._base = base
        self._staging = staging
        self._check_same = check_same

    def save(
        self,
        model_id: str,
        seq_id: int,
        checkpoint_id: str,
        overwrite: bool,
        state: ModelState | ShardedState,
    ) -> int:
        """Writes a checkpoint and returns its bytes. A repeat of the same operation changes nothing.

        Raises:
            InvalidRequest: the name is taken and `overwrite` is false.
            StorageFull: there is no space for it; what was saved before is as it was.
            StorageAway: it cannot be written at present. What is on its way there is found by nobody.
        """
        key = Key(model_id, checkpoint_id, seq_id)
        meta = Meta(self._base.name, self._base.weights, model_id, seq_id, state.step, state.lora)
        return self._publish(key, overwrite, lambda: state_files(SavedState(meta, state)))

    def export(self, model_id: str, seq_id: int, checkpoint_id: str, files: Files) -> int:
        """Writes files for others to use and returns their bytes. Otherwise as `save`."""
        return self._publish(Key(model_id, checkpoint_id, seq_id), False, files)

    def look(self, model_id: str, checkpoint_id: str) -> None:
        """Asks the storage for what it has under a name.

        Raises:
            StorageAway: it does not say at present, or is another one.
        """
        self._check_same()
        try:
            self._storage.versions(model_id, checkpoint_id)
        except OSError as error:
            path = ids.tinker_path(model_id, checkpoint_id)
            raise StorageAway(f"the storage of checkpoint {path} does not answer: {error}") from error

    def find(self, model_id: str, checkpoint_id: str, version: int = 0) -> Found:
        """Which checkpoint `load` would read, and of what it is. Otherwise as `load`."""
        chosen, meta = self._stored(model_id, checkpoint_id, version, read_meta, [_META])
        self._check_base(meta, ids.tinker_path(model_id, checkpoint_id))
        return Found(chosen, meta)

    def load(self, model_id: str, checkpoint_id: str, version: int = 0) -> SavedState:
        """Reads a checkpoint, of any model of this base, under whichever name it was served. The caller
        releases it.

        Args:
            version: seq_id of the save; 0 = the newest.

        Raises:
            NotFound: there is no such checkpoint.
            InvalidRequest: it was saved from another base model.
            DataLoss: its files are damaged.
            StorageFull: a disk of this machine has no space for them on their way.
            StorageAway: whether there is, or what is in it, cannot be read at present.
        """
        _, saved = self._stored(
            model_id, checkpoint_id, version, lambda directory: read_state(directory, self._staging)
        )
        try:
            self._check_base(saved.meta, ids.tinker_path(model_id, checkpoint_id))
        except InvalidRequest:
            saved.release()
            raise
        return saved

    def _stored(
        self,
        model_id: str,
        checkpoint_id: str,
        version: int,
        read: Callable[[Path], T | None],
        only: Collection[str] | None = None,
    ) -> tuple[int, T]:
        """A version, and what is read of the directory with its files, or those of them that are wanted."""
        path = ids.tinker_path(model_id, checkpoint_id)
        try:
            versions = [version] if version else self._storage.versions(model_id, checkpoint_id)[-1:]
            found = None
            for number in versions:
                with self._storage.local(Key(model_id, checkpoint_id, number), only) as directory:
                    found = None if directory is None else read(directory)
        except DataLoss as error:
            raise DataLoss(f"checkpoint {path}: {error.message}") from error
        except LocalDiskFull as error:
            raise StorageFull(
                f"checkpoint {path} was not loaded: {error.strerror}, which it passes; have the operator "
                "free space there, then load it again"
            ) from error
        except OSError as error:
            raise StorageAway(f"checkpoint {path} cannot be read at present: {error}") from error
        if found is None:
            raise NotFound(f"checkpoint {path} does not exist", "checkpoint_not_found")
        return versions[0], found

    def _check_base(self, meta: Meta, path: str) -> None:
        if meta.base_model != self._base.name and meta.weights != self._base.weights:
            raise InvalidRequest(
                f"checkpoint {path} belongs to base model {meta.base_model}; this model trains "
                f"{self._base.name}, which has other weights",
                "base_model_mismatch",
            )

    def _publish(self, key: Key, overwrite: bool, files: Files) -> int:
        path = ids.tinker_path(key.model_id, key.checkpoint_id)
        try:
            versions = self._storage.versions(key.model_id, key.checkpoint_id)
            if not overwrite and any(version < key.version for version in versions):
                raise InvalidRequest(
                    f"checkpoint {path} exists already; choose another name or pass overwrite=True",
                    "checkpoint_exists",
                )
        except OSError as error:
            raise _not_saved(error, path) from error
        try:
            made = files()
        except OSError as error:
            raise failure(error, f"checkpoint {path}") from error
        try:
            size = self._storage.publish(key, made)
        except OSError as error:
            raise _not_saved(error, path) from error
        # It may have gone since `look`.
        self._check_same()
        return size
