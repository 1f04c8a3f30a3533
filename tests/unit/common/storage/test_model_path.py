"""A base model that is not there is said to be that."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest

from services.common.contract.errors import InvalidRequest
from services.common.storage.model_path import check_model_path


def test_a_directory_with_a_model_and_a_name_of_a_hub_are_taken(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    check_model_path(str(tmp_path))
    check_model_path("org/model")


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=f"there is no {tmp_path}/gone: put the model's files into"):
        check_model_path(f"{tmp_path}/gone")
    with pytest.raises(InvalidRequest, match=f"there is no {tmp_path}/config.json"):
        check_model_path(str(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match=r"cannot be read: .*Not a directory"):
        check_model_path(f"{tmp_path}/file")


def test_what_may_not_be_read_is_named_with_the_user_that_may_not(tmp_path: Path) -> None:
    refused = PermissionError(13, "Permission denied", str(tmp_path))
    # Root may read everything.
    with (
        mock.patch.object(Path, "iterdir", side_effect=refused),
        pytest.raises(InvalidRequest, match=f"user {os.getuid()} may not read {tmp_path}: "),
    ):
        check_model_path(str(tmp_path))
