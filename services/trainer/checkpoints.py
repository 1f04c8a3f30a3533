"""Training state on disk: named checkpoints, and the format they share with durable snapshots.

A saved state is a directory of adapter.safetensors, optimizer.safetensors and meta.json. Invariant: it
holds all that a model needs to go on as if it had never stopped, and only tensors and JSON.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import msgspec

from services.common import ids
from services.common.errors import DataLoss, InvalidRequest, NotFound
from services.common.paths import DataDir
from services.common.storage.base import Writer
from services.common.storage.directory import publish_directory
from services.trainer.plan import LoraSpec, ModelState
from services.trainer.tensor_files import load_tensors, save_tensors, save_text

_ADAPTER, _OPTIMIZER, _META = "adapter.safetensors", "optimizer.safetensors", "meta.json"


class Meta(msgspec.Struct, frozen=True):
    """What meta.json says. `seq_id` is the operation after which the state was taken."""

    base_model: str
    model_id: str
    seq_id: int
    step: int
    lora: LoraSpec


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
    """Named checkpoints of one base model. Blocking; call from a thread."""

    def __init__(self, data: DataDir, base_model: str) -> None:
        self._data = data
        self._base_model = base_model

    def save(self, model_id: str, seq_id: int, checkpoint_id: str, overwrite: bool, state: ModelState) -> int:
        """Writes a checkpoint and returns its bytes. A repeat of the same operation changes nothing.

        Raises:
            InvalidRequest: the name is taken and `overwrite` is false.
        """
        target = self._data.checkpoint(model_id, checkpoint_id)
        existing = read_meta(target)
        if existing is not None and existing.seq_id >= seq_id:
            # This operation, or a later one of the same model, has written it before a restart.
            return sum(path.stat().st_size for path in target.iterdir())
        if existing is not None and not overwrite:
            raise InvalidRequest(
                f"checkpoint {ids.tinker_path(model_id, checkpoint_id)} exists already; choose another "
                "name or pass overwrite=True",
                "checkpoint_exists",
            )
        meta = Meta(self._base_model, model_id, seq_id, state.step, state.lora)
        return publish_directory(target, state_files(SavedState(meta, state)), replace=overwrite)

    def load(self, model_id: str, checkpoint_id: str) -> SavedState:
        """Reads a checkpoint, of any model of this base.

        Raises:
            NotFound: there is no such checkpoint.
            InvalidRequest: it was saved from another base model.
            DataLoss: its files are damaged.
        """
        path = ids.tinker_path(model_id, checkpoint_id)
        saved = read_state(self._data.checkpoint(model_id, checkpoint_id))
        if saved is None:
            raise NotFound(f"checkpoint {path} does not exist", "checkpoint_not_found")
        if saved.meta.base_model != self._base_model:
            raise InvalidRequest(
                f"checkpoint {path} belongs to base model {saved.meta.base_model}; this model trains "
                f"{self._base_model}",
                "base_model_mismatch",
            )
        return saved
