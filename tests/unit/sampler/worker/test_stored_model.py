"""A model's directory is whole, or it is refused before anything of it is loaded."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from services.common.contract.errors import DataLoss, SnapshotNotFound, TinsmithError
from services.sampler.worker.stored_model import weight_files

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_file({"a": np.ones((4, 2), np.float32)}, tmp_path / FIRST, {"format": "pt"})
    save_file({"b": np.ones(3, np.float32), "c": np.ones(0, np.float32)}, tmp_path / SECOND)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": FIRST, "b": SECOND, "c": SECOND}}))
    return tmp_path


def test_all_files_of_a_whole_model_are_named_and_nothing_else(sharded: Path) -> None:
    save_file({"old": np.ones(3, np.float32)}, sharded / "consolidated.safetensors")
    assert weight_files(sharded) == [sharded / FIRST, sharded / SECOND]


def test_a_model_in_one_file_needs_no_index(tmp_path: Path) -> None:
    save_file({"a": np.ones(4, np.float32)}, tmp_path / "model.safetensors")
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]


@pytest.mark.parametrize("missing", [FIRST, SECOND, INDEX])
def test_a_model_that_lacks_a_file_is_refused_by_its_name(sharded: Path, missing: str) -> None:
    (sharded / missing).unlink()
    with pytest.raises(SnapshotNotFound, match=re.escape(missing)):
        weight_files(sharded)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SnapshotNotFound, match="no weights"):
        weight_files(tmp_path)


def test_a_file_that_was_cut_anywhere_is_refused(sharded: Path) -> None:
    whole = (sharded / SECOND).read_bytes()
    for length in range(len(whole)):
        (sharded / SECOND).write_bytes(whole[:length])
        with pytest.raises(TinsmithError, match=SECOND):
            weight_files(sharded)
    (sharded / SECOND).write_bytes(whole + b"\0")
    with pytest.raises(DataLoss, match="bytes of weights"):
        weight_files(sharded)


def test_a_file_that_lacks_a_tensor_of_the_index_is_refused(sharded: Path) -> None:
    save_file({"b": np.ones(3, np.float32)}, sharded / SECOND)
    with pytest.raises(DataLoss, match="lacks c"):
        weight_files(sharded)


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"weight_map": 3}'])
def test_an_index_that_cannot_be_read_is_refused(sharded: Path, index: str) -> None:
    (sharded / INDEX).write_text(index)
    with pytest.raises(DataLoss, match=INDEX):
        weight_files(sharded)
