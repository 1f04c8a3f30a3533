"""Whether a process looks for garbage when it ends."""

from __future__ import annotations

import os
import subprocess
import sys

from services.sampler.engine.child import PARENT

_CODE = """
{begins}
class Garbage:
    def __del__(self):
        print("found")
garbage = Garbage()
garbage.itself = garbage
"""


def is_looked_for_after(begins: str) -> bool:
    """Whether a process that begins so finds at its end what nothing but a look for garbage finds."""
    done = subprocess.run(
        [sys.executable, "-c", _CODE.format(begins=begins)],
        env={**os.environ, PARENT: str(os.getpid())},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout in ("", "found\n")
    return bool(done.stdout)
