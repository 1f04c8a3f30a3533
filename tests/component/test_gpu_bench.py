"""`python -m bench gpu` in its short form: all of it, on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.gpu import program

pytestmark = pytest.mark.heavy


def test_every_cell_is_measured_on_both_sides_and_numbers_are_exact(tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--shapes", "tiny", "--out", str(tmp_path), "--name", "short"]
    status = program.main(arguments)
    report = json.loads((tmp_path / "short.json").read_text())
    assert status == 0, report["rows"]
    units = [row["unit"] for row in report["rows"]]
    assert units.count("x tokens/s") == 4
    assert units.count("ms") == 2
    assert units.count("x") == 2
    assert len(units) == 4 + 4 + 2 + 2
    assert not [row for row in report["rows"] if row["unit"].startswith("not ")]


def test_without_a_gpu_it_says_what_runs_instead(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if not torch.cuda.is_available():
        assert program.main([]) == 2
        assert "--device cpu" in capsys.readouterr().out


def test_what_the_time_is_over_for_is_left_out(tmp_path: Path) -> None:
    with program.Side("peft", "tiny", "cpu", tmp_path, program.Clock(0.0)) as worker:
        assert worker.ask("train", tokens=64, adapters=1, limit_s=1.0) == {"left_out": "no time was left"}
