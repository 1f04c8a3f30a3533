"""Identifiers and the paths made from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.common.contract import ids
from services.common.contract.errors import InvalidRequest
from services.common.storage.data_dir import DataDir

SESSION = "0b0e9f2c-7a55-4c3e-9a43-000000000001"
MODEL = f"{SESSION}:train:0"


def test_a_request_id_names_its_object_and_number() -> None:
    assert ids.parse_request_id(ids.request_id(MODEL, 17)) == (MODEL, 17)
    sampler = ids.sampling_session_id(SESSION, 3)
    assert ids.parse_request_id(ids.request_id(sampler, 10**18)) == (sampler, 10**18)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        MODEL,
        f"{MODEL}:",
        f"{MODEL}:-1",
        f"{MODEL}:1:2",
        f"../{MODEL}:1",
        f"{MODEL}:1\n",
        f"{MODEL}:١",
        f"{SESSION}:train:٣:1",
    ],
)
def test_anything_else_is_no_request_id(text: str) -> None:
    with pytest.raises(InvalidRequest):
        ids.parse_request_id(text)


def test_a_tinker_path_names_its_model_and_checkpoint() -> None:
    path = ids.tinker_path(MODEL, "weights/final")
    assert path == f"tinker://{MODEL}/weights/final"
    assert ids.parse_tinker_path(path) == (MODEL, "weights/final")


@pytest.mark.parametrize(
    "path",
    [
        "tinker://",
        f"tinker://{MODEL}/weights/",
        f"tinker://{MODEL}/weights/a/b",
        f"tinker://{MODEL}/weights/..",
        f"tinker://{MODEL}/other/a",
        f"tinker://../{MODEL}/weights/a",
        "/etc/passwd",
    ],
)
def test_a_path_of_another_form_is_refused(path: str) -> None:
    with pytest.raises(InvalidRequest, match="tinker://"):
        ids.parse_tinker_path(path)


@pytest.mark.parametrize("name", ["final", "000100", "_best", "epoch=3-loss=0.5", "v1.2+a,b@c~d", "x" * 200])
def test_a_checkpoint_name_is_part_of_its_path(name: str) -> None:
    path = ids.tinker_path(MODEL, ids.checkpoint_id("weights", name))
    assert ids.parse_tinker_path(path) == (MODEL, f"weights/{name}")


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "a/b", "a\\b", "-x", ".hidden", "x" * 201, "a b", "é", "a:b", "a%2e", "~x", "a?b", "a#b"],
)
def test_a_checkpoint_name_with_other_characters_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="checkpoint name"):
        ids.checkpoint_id("weights", name)


def test_every_path_is_inside_the_data_directory(tmp_path: Path) -> None:
    data = DataDir(tmp_path)
    for path in (data.checkpoints, data.staging, data.snapshot(MODEL, 3), data.state(MODEL)):
        assert path.resolve().is_relative_to(tmp_path.resolve())


@pytest.mark.parametrize("model", ["..", "../x:train:0", "a/b:train:0", "x:train:", "x:sample:0"])
def test_an_id_that_is_none_never_becomes_a_path(tmp_path: Path, model: str) -> None:
    data = DataDir(tmp_path)
    with pytest.raises(InvalidRequest):
        data.state(model)
    with pytest.raises(InvalidRequest):
        data.snapshot(model, 1)


@pytest.mark.parametrize("digits", ["٣", "³", "１"])
def test_only_the_ten_ascii_digits_are_digits(digits: str) -> None:
    assert not ids.is_model_id(f"{SESSION}:train:{digits}")
    assert not ids.is_sampling_session_id(f"{SESSION}:sample:{digits}")
    with pytest.raises(InvalidRequest):
        ids.parse_tinker_path(f"tinker://{SESSION}:train:{digits}/weights/a")
