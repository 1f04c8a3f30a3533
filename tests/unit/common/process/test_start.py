"""What every service does first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.common.process import garbage


def test_a_service_warns_of_a_variable_that_is_none_and_starts(tmp_path: Path) -> None:
    # In a process of its own, which setting up ties to its parent and to a umask.
    code = (
        "import logging, pathlib; from services.common.process import process; logging.basicConfig();"
        f"process.setup_process('x', pathlib.Path({str(tmp_path)!r})); print('started')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TINSMITH_MAX_LORA_RNK": "8", "TINSMITH_ZERO_STAGE": "3"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "started\n"
    (warning,) = [line for line in done.stderr.splitlines() if line.startswith("WARNING")]
    assert "TINSMITH_MAX_LORA_RNK is no variable of Tinsmith; did you mean TINSMITH_MAX_LORA_RANK?" in warning


@pytest.mark.parametrize(
    ("before", "after"),
    [("", signal.SIGTERM), ("process.die_with_parent(signal.SIGKILL); ", signal.SIGKILL)],
)
def test_a_service_is_told_of_its_parents_end_as_who_started_it_chose(
    before: str, after: signal.Signals
) -> None:
    code = (
        "import ctypes, signal; from services.common.process import process; number = ctypes.c_int();"
        f"{before}process.setup_process('x', None);"
        "ctypes.CDLL(None).prctl(2, ctypes.byref(number), 0, 0, 0); print(number.value)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert int(done.stdout) == after


def test_a_service_ends_without_a_look_for_garbage() -> None:
    begins = "from services.common.process import process; process.setup_process('x', None)"
    assert not garbage.is_looked_for_after(begins)
