"""What the suite says at its end of what failed in it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from scripts.failed_tests import failures

TESTS = """
import pytest

@pytest.fixture
def away():
    raise OSError("no such server")

@pytest.mark.parametrize("found", [2, 3])
def test_numbers(found):
    assert found == 2, "it is not two"

def test_a_server(away):
    pass
"""


def test_every_test_that_failed_is_said_once_more_with_what_pytest_said_of_it(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_these.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests", "--junitxml=report.xml"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=120).returncode == 1
    fixture, number = sorted(failures(tmp_path / "report.xml"))
    assert fixture.startswith("-- tests/test_these.py::test_a_server (error)\n")
    assert "OSError: no such server" in fixture
    assert number.startswith("-- tests/test_these.py::test_numbers[3] (failure)\n")
    assert "it is not two" in number


def test_a_part_that_ended_before_its_report_has_none(tmp_path: Path) -> None:
    assert list(failures(tmp_path / "none.xml")) == []
