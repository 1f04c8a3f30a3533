"""The model that is served when none is named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from services.common.contract.errors import Unavailable
from services.launcher import default_model


def test_a_converted_model_is_used_as_it_is(tmp_path: Path) -> None:
    target = tmp_path / "SmolLM2-135M-Instruct"
    target.mkdir()
    (target / "config.json").write_text("{}")
    assert default_model.prepare(tmp_path) == str(target)


def test_without_the_wheel_the_hub_id_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model, "gguf_file", lambda: None)
    assert default_model.prepare(tmp_path) == default_model.NAME


def test_a_failed_conversion_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: Path, target: Path) -> None:
        (target / "config.json").write_text("{}")
        raise RuntimeError("disk full")

    monkeypatch.setattr(default_model, "gguf_file", lambda: tmp_path / "model.gguf")
    monkeypatch.setattr(default_model, "_convert_apart", fail)
    with pytest.raises(RuntimeError, match="disk full"):
        default_model.prepare(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_conversion_that_ends_badly_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model, "gguf_file", lambda: tmp_path / "model.gguf")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert not default_model.is_ready(tmp_path / "cache")
    with pytest.raises(Unavailable, match="cannot be prepared"):
        default_model.prepare(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
