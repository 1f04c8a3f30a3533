"""A service that has ended is gone within seconds."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

HANGS = """
import asyncio, time
from services.common.process import process

async def work():
    asyncio.get_running_loop().run_in_executor(None, time.sleep, 3600)
    await asyncio.sleep(0.1)
    {ends}

process.exit_after(lambda: process.run(work()))
"""


@pytest.mark.parametrize(
    ("ends", "status"),
    [
        ("return 3", 3),
        ("raise ValueError('it broke')", 1),
        ("raise SystemExit(5)", 5),
        ("raise SystemExit", 0),
        ("raise SystemExit('it broke')", 1),
    ],
)
def test_a_service_ends_though_a_thread_waits_for_a_file(ends: str, status: int) -> None:
    program = textwrap.dedent(HANGS).format(ends=ends)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == status
    assert ("it broke" in done.stderr) == ("it broke" in ends)
