"""Safetensors and text as files.

Invariant: writing needs no copy of the tensors in memory, whatever their size and element type.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from services.common.contract.errors import DataLoss
from services.common.contract.tensors import ITEM_SIZE
from services.common.storage.base import Writer
from services.trainer.compute.data import HostArray

_DTYPES = {"float32": "F32", "bfloat16": "BF16", "int64": "I64", "int32": "I32"}
_ALIGNMENT = 8


def save_tensors(tensors: Mapping[str, HostArray]) -> Writer:
    """Writes tensors as one safetensors file."""
    return lambda path: _write(path, tensors)


def save_text(text: str) -> Writer:
    """Writes a text file."""
    return lambda path: path.write_text(text)


def load_tensors(path: Path) -> dict[str, HostArray]:
    """Reads a safetensors file of float32 tensors.

    Raises:
        DataLoss: the file is damaged.
    """
    try:
        found = safetensors.numpy.load(path.read_bytes())
    except safetensors.SafetensorError as error:
        raise DataLoss(f"{path.name} is damaged: {error}") from error
    if any(array.dtype != np.float32 for array in found.values()):
        raise DataLoss(f"{path.name} is damaged: it holds other tensors than float32")
    return {name: HostArray("float32", array.shape, array.tobytes()) for name, array in found.items()}


def _write(path: Path, tensors: Mapping[str, HostArray]) -> None:
    """The format: length of the header (u64), header in JSON padded with spaces, the tensors' bytes."""
    # Wide elements first, so that every tensor starts at a multiple of its element's size.
    names = sorted(tensors, key=lambda name: (-ITEM_SIZE[tensors[name].dtype], name))
    # The format key is what other readers of the file (transformers, PEFT) look for.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        array = tensors[name]
        end = offset + len(array.data)
        header[name] = {
            "dtype": _DTYPES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in names:
            file.write(tensors[name].data)
