"""Tests of components and clusters that share what takes long to start, or a file, run in one process."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from tests import groups
from tests.groups import CLUSTER, SHARED

USES = """
import time
import pytest

@pytest.mark.parametrize("number", range(8))
def test_something({uses}number):
    time.sleep(0.1)
"""


def test_what_is_shared_is_started_once(tmp_path: Path) -> None:
    assert groups.__file__
    shutil.copy(groups.__file__, tmp_path / "conftest.py")
    fixtures = "\n".join(
        f"@pytest.fixture(scope='session')\ndef {name}(): pass" for name in (*SHARED, CLUSTER)
    )
    (tmp_path / "plugin.py").write_text(f"import pytest\n{fixtures}\n")
    for name in SHARED:
        for file in ("a", "b"):
            (tmp_path / f"test_{name}_{file}.py").write_text(USES.format(uses=f"{name}, "))
    for file in ("a", "b"):
        (tmp_path / f"test_alone_{file}.py").write_text(USES.format(uses=""))
        (tmp_path / f"of_{file}").mkdir()
        for number in (1, 2):
            of = f"test_{CLUSTER}_{number}_of_{file}.py"
            (tmp_path / f"of_{file}" / of).write_text(USES.format(uses=f"{CLUSTER}, "))
    command = [sys.executable, "-m", "pytest", "-v", "-p", "plugin", "-n", "2", "--dist", "loadgroup"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    ran = re.findall(r"\[(gw\d)\].* PASSED (?:\w+/)?test_(\w+)\.py::", done.stdout)
    assert len(ran) == 8 * 2 * (len(SHARED) + 1 + 2)
    processes = defaultdict(set)
    for process, file in ran:
        name, _, letter = file.rpartition("_")
        folder = f"of_{letter}" if name.startswith(CLUSTER) else file
        processes[name if name in SHARED else folder].add(process)
    assert all(len(each) == 1 for each in processes.values()), processes
    assert {process for process, _ in ran} == {"gw0", "gw1"}
