"""What the suite says at its end of what failed in it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from scripts.failed_tests import failures

ROOT = Path(__file__).parents[2]
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


def test_of_a_report_that_is_cut_off_it_is_said_and_the_others_are_told(tmp_path: Path) -> None:
    case = '<testcase classname="tests.test_a" name="test_b"><error>away</error></testcase>'
    whole = f"<testsuites>{case}</testsuites>"
    cut_off, empty, last = (tmp_path / f"{number}.xml" for number in range(3))
    cut_off.write_text(whole[: whole.index("</error>")])
    empty.write_text("")
    last.write_text(whole)
    command = [sys.executable, "-m", "scripts.failed_tests", *map(str, (cut_off, empty, last))]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=120, text=True, check=True)
    first, second, *others = told.stdout.splitlines()
    assert first.startswith(f"-- {cut_off} cannot be read (")
    assert second.startswith(f"-- {empty} cannot be read (")
    assert others == ["-- tests/test_a.py::test_b (error)", "   away"]
