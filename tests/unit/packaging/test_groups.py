"""Component tests that share what takes long to start, or a file, run in one process."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from tests.component import conftest
from tests.component.conftest import SHARED

USES = """
import time
import pytest

@pytest.mark.parametrize("number", range(8))
def test_something({uses}number):
    time.sleep(0.1)
"""


def test_what_is_shared_is_started_once(tmp_path: Path) -> None:
    assert conftest.__file__
    shutil.copy(conftest.__file__, tmp_path / "conftest.py")
    fixtures = "\n".join(f"@pytest.fixture(scope='session')\ndef {name}(): pass" for name in SHARED)
    (tmp_path / "plugin.py").write_text(f"import pytest\n{fixtures}\n")
    for name in SHARED:
        for file in ("a", "b"):
            (tmp_path / f"test_{name}_{file}.py").write_text(USES.format(uses=f"{name}, "))
    for file in ("a", "b"):
        (tmp_path / f"test_alone_{file}.py").write_text(USES.format(uses=""))
    command = [sys.executable, "-m", "pytest", "-v", "-p", "plugin", "-n", "2", "--dist", "loadgroup"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    ran = re.findall(r"\[(gw\d)\].* PASSED test_(\w+)\.py::", done.stdout)
    assert len(ran) == 8 * 2 * (len(SHARED) + 1)
    processes = defaultdict(set)
    for process, file in ran:
        name = file.rpartition("_")[0]
        processes[name if name in SHARED else file].add(process)
    assert all(len(each) == 1 for each in processes.values()), processes
    assert {process for process, _ in ran} == {"gw0", "gw1"}
