"""Component tests that share what takes long to start, or a file, run in one process; the long ones first."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from tests.cluster.conftest import ROOMS
from tests.component import conftest
from tests.component.conftest import LONGEST, SHARED

TESTS = Path(__file__).parents[3] / "tests"

USES = """
import time
import pytest

@pytest.mark.parametrize("number", range(8))
def test_something({uses}number):
    time.sleep(0.1)
"""


def lay_out(directory: Path) -> None:
    """Two files of tests for each thing that is shared, and two that share nothing."""
    assert conftest.__file__
    shutil.copy(conftest.__file__, directory / "conftest.py")
    fixtures = "\n".join(f"@pytest.fixture(scope='session')\ndef {name}(): pass" for name in SHARED)
    (directory / "plugin.py").write_text(f"import pytest\n{fixtures}\n")
    for name in SHARED:
        for file in ("a", "b"):
            (directory / f"test_{name}_{file}.py").write_text(USES.format(uses=f"{name}, "))
    for file in ("a", "b"):
        (directory / f"test_alone_{file}.py").write_text(USES.format(uses=""))


def pytest_in(directory: Path, *options: str) -> str:
    command = [sys.executable, "-m", "pytest", "-v", "-p", "plugin", *options]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_what_is_shared_is_started_once(tmp_path: Path) -> None:
    lay_out(tmp_path)
    said = pytest_in(tmp_path, "-n", "2", "--dist", "loadgroup")
    ran = re.findall(r"\[(gw\d)\].* PASSED test_(\w+)\.py::", said)
    assert len(ran) == 8 * 2 * (len(SHARED) + 1)
    processes = defaultdict(set)
    for process, file in ran:
        name = file.rpartition("_")[0]
        processes[name if name in SHARED else file].add(process)
    assert all(len(each) == 1 for each in processes.values()), processes
    assert {process for process, _ in ran} == {"gw0", "gw1"}


def test_what_takes_longest_is_begun_first_and_is_there(tmp_path: Path) -> None:
    lay_out(tmp_path)
    files = re.findall(r"<Module test_(\w+)_[ab]\.py>", pytest_in(tmp_path, "--collect-only"))
    long = [name for name in LONGEST if name in SHARED]
    assert len(long) > 1 and [*dict.fromkeys(files)][: len(long)] == long
    assert [group for group in LONGEST if group not in SHARED and not (TESTS.parent / group).is_file()] == []
    assert set(ROOMS) == {path.parent.name for path in TESTS.glob("cluster/*/test_*.py")}
