"""How much memory some code takes, measured in a process of its own.

tracemalloc of Python 3.11 and 3.12.8 crashes a process whose other threads allocate while it is stopped
(python/cpython#128679); those of a test run do.
"""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import tracemalloc
{prepare}
tracemalloc.start()
{measured}
print(tracemalloc.get_traced_memory()[1])
{check}
"""


def peak_bytes(prepare: str, measured: str, check: str = "") -> int:
    """Most bytes that Python objects and NumPy arrays took at once in `measured`.

    Args:
        prepare: runs before it; `check`: after it. Whatever either raises fails the test.
    """
    program = _PROGRAM.format(prepare=prepare, measured=measured, check=check)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)
