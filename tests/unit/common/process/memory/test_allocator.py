"""The C allocator keeps what was freed, and gives it back when it is asked to."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

_PROGRAM = """
import json, resource, sys
import torch
from services.common.process.memory import allocator
from services.common.process.threads import WorkerThread

torch.set_num_threads(1)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

def use():
    # As the tensors of a pass: all gone before the next ones come.
    some = [torch.ones((2 << 20) + 1000 * number) for number in range(15)]

def run():
    told = allocator.keep_freed_memory() if "keeps" in sys.argv else None
    for _ in range(5):
        use()
    before = faults()
    for _ in range(10):
        use()
    found = faults() - before
    kept = resident()
    allocator.give_back()
    return told, found, kept - resident()

# As a trainer's engine and as a sampler's worker.
found = WorkerThread("engine").submit(run).result() if "thread" in sys.argv else run()
print(json.dumps(found))
"""
_USED = 15 * 8 * 2**20


def run(*how: str) -> Any:
    """Whether the allocator was told; pages that the kernel had to clear for ten times 120 MiB that were used
    and freed before; and bytes that went back."""
    command = [sys.executable, "-c", _PROGRAM, *how]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is told")
@pytest.mark.parametrize("where", ["thread", "main"])
def test_memory_that_was_freed_is_used_again_and_goes_back_when_asked(where: str) -> None:
    told, cleared, back = run("keeps", where)
    assert told
    # Of 4 KiB each. Untold it is mostly all of them, and few where huge pages or the heap's layout have it.
    assert cleared < 10 * _USED / 4096 / 20
    assert back > _USED / 2
