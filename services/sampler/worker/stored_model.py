"""The files of a model's directory, whole or refused.

Invariant: `weight_files` names files only after it has seen that each is there and as long as it says, and
that they have all tensors of the index. So what was cut short is refused before a weight is replaced.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.common.contract.errors import DataLoss, SnapshotNotFound

_INDEX = "model.safetensors.index.json"
_LENGTH_BYTES = 8
_MOST_HEADER = 100 << 20
"""As safetensors itself has it."""


def weight_files(directory: Path) -> list[Path]:
    """The files with a model's weights.

    Raises:
        SnapshotNotFound: there are none, or one is missing.
        DataLoss: one is not what it was written as.
    """
    placed = _index(directory)
    names = set(placed.values()) or {path.name for path in directory.glob("*.safetensors")}
    if not names:
        raise SnapshotNotFound(f"there are no weights in {directory}; save them again")
    files = {name: _tensors(directory / name) for name in sorted(names)}
    for tensor, name in placed.items():
        if tensor not in files[name]:
            raise DataLoss(f"{directory / name} lacks {tensor}; save the weights again")
    return [directory / name for name in files]


def _index(directory: Path) -> Mapping[str, str]:
    """Which file has which tensor; nothing when one file has all."""
    path = directory / _INDEX
    if not path.exists():
        if parts := sorted(directory.glob("*-of-*.safetensors")):
            raise SnapshotNotFound(f"{parts[0].name} is there, {path} is not; save the weights again")
        return {}
    try:
        placed: dict[str, str] = json.loads(path.read_bytes())["weight_map"]
        return {str(tensor): Path(name).name for tensor, name in placed.items()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise DataLoss(f"{path} cannot be read: {error}; save the weights again") from error


def _tensors(path: Path) -> Mapping[str, Any]:
    """What a file says that it has, when it is as long as it says."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if length > _MOST_HEADER:
                raise ValueError("it does not begin with a header")
            header: Mapping[str, Any] = json.loads(file.read(length))
        size = path.stat().st_size - _LENGTH_BYTES - length
        tensors = {name: told for name, told in header.items() if name != "__metadata__"}
        wanted = max((int(told["data_offsets"][1]) for told in tensors.values()), default=0)
    except FileNotFoundError as error:
        raise SnapshotNotFound(f"{path} is missing; save the weights again") from error
    except (ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
        raise DataLoss(f"{path} cannot be read: {error}; save the weights again") from error
    if size != wanted:
        raise DataLoss(f"{path} has {size} bytes of weights, and not {wanted}; save the weights again")
    return tensors
