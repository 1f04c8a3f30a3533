"""The C allocator keeps what was freed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

_FAULTS = """
import json, resource, sys
import torch
from services.common.process.memory import allocator

torch.set_num_threads(1)
told = allocator.keep_freed_memory() if sys.argv[1] == "keeps" else None

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def use():
    # As the tensors of a pass: all gone before the next ones come.
    some = [torch.ones((10 << 20) + 1000 * number) for number in range(3)]

for _ in range(5):
    use()
before = faults()
for _ in range(10):
    use()
print(json.dumps([told, faults() - before]))
"""


def faults(how: str) -> tuple[bool | None, int]:
    """Pages that the kernel had to clear for ten times 120 MiB that were used and freed before."""
    command = [sys.executable, "-c", _FAULTS, how]
    told, found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return told, found


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is told")
def test_memory_that_was_freed_is_used_again_without_being_cleared_by_the_kernel() -> None:
    told, kept = faults("keeps")
    assert told
    assert kept < faults("leaves")[1] / 10
