"""Safetensors files: who may read them, and what goes wrong while they are written or read."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common.contract.errors import DataLoss, StorageFull
from services.common.contract.tensors import HostTensor
from services.common.storage.base import failure
from services.trainer.files.tensor_files import load_tensors, save_tensors

TENSORS = {"b": HostTensor("float32", (2, 1), b"\1\2\3\4" * 2), "a": HostTensor("float32", (0, 3), b"")}


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file of this process may grow beyond 64 KiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    save_tensors(TENSORS)(tmp_path / "x")
    assert load_tensors(tmp_path / "x") == TENSORS


def test_a_file_can_be_read_by_whom_the_umask_lets(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        save_tensors(TENSORS)(tmp_path / "x")
    finally:
        os.umask(before)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640


def test_a_full_disk_is_an_error_of_the_operating_system(tmp_path: Path, small_files: None) -> None:
    large = {"a": HostTensor("float32", (1 << 15,), bytes(4 << 15))}
    with pytest.raises(OSError, match="x failed") as caught:
        save_tensors(large)(tmp_path / "x")
    assert caught.value.errno == errno.EFBIG
    assert isinstance(failure(caught.value, "checkpoint"), StorageFull)


def test_a_damaged_file_is_reported(tmp_path: Path) -> None:
    save_tensors(TENSORS)(tmp_path / "x")
    whole = (tmp_path / "x").read_bytes()
    (tmp_path / "x").write_bytes(whole[:-1])
    with pytest.raises(DataLoss, match="x is damaged"):
        load_tensors(tmp_path / "x")
    save_tensors({"a": HostTensor("int32", (1,), b"\0" * 4)})(tmp_path / "y")
    with pytest.raises(DataLoss, match="other tensors than float32"):
        load_tensors(tmp_path / "y")
