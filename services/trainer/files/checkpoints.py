"""Training state on disk: named checkpoints, and the format they share with durable snapshots.

A saved state is a directory of adapter.safetensors, optimizer.safetensors and meta.json. Invariant: it
holds all that a model needs to go on as if it had never stopped, and only tensors and JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from services.common.contract import ids
from services.common.contract.errors import DataLoss, InvalidRequest, NotFound
from services.common.storage.base import Key, Storage, Writer, failure
from services.trainer.compute.data import LoraSpec, ModelState
from services.trainer.files.tensor_files import load_tensors, save_tensors, save_text

_ADAPTER, _OPTIMIZER, _META = "adapter.safetensors", "optimizer.safetensors", "meta.json"


Files = Callable[[], Mapping[str, Writer]]
"""Makes the files of an export. Blocking."""


class Meta(msgspec.Struct, frozen=True):
    """What meta.json says. `seq_id` is the operation after which the state was taken; `lora` None: the
    model trains all weights."""

    base_model: str
    model_id: str
    seq_id: int
    step: int
    lora: LoraSpec | None


@dataclass(frozen=True)
class SavedState:
    """A saved state in memory."""

    meta: Meta
    state: ModelState


def state_files(saved: SavedState) -> dict[str, Writer]:
    """The files of a saved state."""
    meta = json.dumps(msgspec.to_builtins(saved.meta), indent=2)
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
    except msgspec.DecodeError as error:
        raise DataLoss(f"{_META} in {directory.name} is damaged: {error}") from error


def read_state(directory: Path) -> SavedState | None:
    """The saved state in a directory; None when there is no such directory.

    Raises:
        DataLoss: a file is missing or damaged.
    """
    meta = read_meta(directory)
    if meta is None:
        return None
    try:
        adapter, optimizer = load_tensors(directory / _ADAPTER), load_tensors(directory / _OPTIMIZER)
    except FileNotFoundError as error:
        raise DataLoss(f"saved state {directory.name} is incomplete: {error}") from error
    return SavedState(meta, ModelState(meta.lora, adapter, optimizer, meta.step))


class CheckpointStore:
    """Named checkpoints and exports of one base model's models. Blocking; call from a thread."""

    def __init__(self, storage: Storage, base_model: str) -> None:
        self._storage = storage
        self._base_model = base_model

    def save(self, model_id: str, seq_id: int, checkpoint_id: str, overwrite: bool, state: ModelState) -> int:
        """Writes a checkpoint and returns its bytes. A repeat of the same operation changes nothing.

        Raises:
            InvalidRequest: the name is taken and `overwrite` is false.
            StorageFull, Internal: it could not be written; what was saved before is as it was.
        """
        key = Key(model_id, checkpoint_id, seq_id)
        meta = Meta(self._base_model, model_id, seq_id, state.step, state.lora)
        return self._publish(key, overwrite, lambda: state_files(SavedState(meta, state)))

    def export(self, model_id: str, seq_id: int, checkpoint_id: str, files: Files) -> int:
        """Writes files for others to use and returns their bytes. Otherwise as `save`."""
        return self._publish(Key(model_id, checkpoint_id, seq_id), False, files)

    def load(self, model_id: str, checkpoint_id: str, version: int = 0) -> SavedState:
        """Reads a checkpoint, of any model of this base.

        Args:
            version: seq_id of the save; 0 = the newest.

        Raises:
            NotFound: there is no such checkpoint.
            InvalidRequest: it was saved from another base model.
            DataLoss: its files are damaged.
        """
        path = ids.tinker_path(model_id, checkpoint_id)
        versions = [version] if version else self._storage.versions(model_id, checkpoint_id)[-1:]
        saved = self._read(Key(model_id, checkpoint_id, versions[0]), path) if versions else None
        if saved is None:
            raise NotFound(f"checkpoint {path} does not exist", "checkpoint_not_found")
        if saved.meta.base_model != self._base_model:
            raise InvalidRequest(
                f"checkpoint {path} belongs to base model {saved.meta.base_model}; this model trains "
                f"{self._base_model}",
                "base_model_mismatch",
            )
        return saved

    def _publish(self, key: Key, overwrite: bool, files: Files) -> int:
        path = ids.tinker_path(key.model_id, key.checkpoint_id)
        try:
            versions = self._storage.versions(key.model_id, key.checkpoint_id)
            if not overwrite and any(version < key.version for version in versions):
                raise InvalidRequest(
                    f"checkpoint {path} exists already; choose another name or pass overwrite=True",
                    "checkpoint_exists",
                )
            return self._storage.publish(key, files())
        except OSError as error:
            raise failure(error, f"checkpoint {path}") from error

    def _read(self, key: Key, path: str) -> SavedState | None:
        try:
            with self._storage.local(key) as directory:
                return None if directory is None else read_state(directory)
        except DataLoss as error:
            raise DataLoss(f"checkpoint {path}: {error.message}") from error
