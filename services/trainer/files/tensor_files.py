"""Safetensors and text as files.

Invariant: writing needs no copy of the tensors in memory, whatever their size and element type.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import safetensors

from services.common.contract.errors import DataLoss
from services.common.contract.tensors import HostTensor
from services.common.storage.base import Writer, os_error


def save_tensors(tensors: Mapping[str, HostTensor]) -> Writer:
    """Writes tensors as one safetensors file."""
    return lambda path: _write(path, tensors)


def save_text(text: str) -> Writer:
    """Writes a text file."""
    return lambda path: path.write_text(text)


def load_tensors(path: Path) -> dict[str, HostTensor]:
    """Reads a safetensors file of float32 tensors.

    Raises:
        DataLoss: the file is damaged.
    """
    try:
        # Read, not mapped: a mapped file that a network file system loses would end the process.
        found = dict(safetensors.deserialize(path.read_bytes()))
    except safetensors.SafetensorError as error:
        raise DataLoss(f"{path.name} is damaged: {error}") from error
    if any(array["dtype"] != "F32" for array in found.values()):
        raise DataLoss(f"{path.name} is damaged: it holds other tensors than float32")
    # One after the other, so that only one exists twice.
    read = ((name, found.pop(name)) for name in list(found))
    return {name: HostTensor("float32", tuple(array["shape"]), bytes(array["data"])) for name, array in read}


def _write(path: Path, tensors: Mapping[str, HostTensor]) -> None:
    # The library writes to a private temporary file; what others may read is for the umask to say.
    path.touch()
    mode = path.stat().st_mode
    specs = {
        name: safetensors.TensorSpec(
            dtype=tensor.dtype,
            shape=list(tensor.shape),
            data_ptr=np.frombuffer(tensor.data, np.uint8).ctypes.data,
            data_len=len(tensor.data),
        )
        for name, tensor in tensors.items()
    }
    try:
        # The format key is what other readers of the file (transformers, PEFT) look for.
        safetensors.serialize_file(specs, path, metadata={"format": "pt"})
    except safetensors.SafetensorError as error:
        raise os_error(f"writing {path.name} failed: {error}") from error
    path.chmod(mode)
