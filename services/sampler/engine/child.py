"""First module of every process that the engine spawns; see `__main__.py`.

Invariant: importing it under the name that multiprocessing gives to a child's main module ties that
process to its parent, before anything else is loaded, also when the parent has ended by then, and takes it
out of the parent's process group: Ctrl-C in a terminal reaches the parent alone, which drains before it ends
the engine. Any other import does nothing. Such a process writes where all its threads are to its log on
STACKS_SIGNAL, also when it hangs in a kernel, and is found by that it heeds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import signal
from pathlib import Path

from services.common.process.memory import collector
from services.common.process.process import die_with_parent
from services.common.telemetry import logs

STACKS_SIGNAL = signal.SIGUSR1
PARENT = "TINSMITH_PARENT"
"""The variable with the pid of the process that spawns."""

_PROC = Path("/proc")
_APART_S = 0.1
"""Between the stacks of one process and those of the next: each is written in many small pieces, and those of
two at a time cannot be read."""


async def dump_stacks(pid: int) -> None:
    """Has all processes below this one that can write where their threads are to their log: an engine's core,
    and the workers that it started. Linux alone; elsewhere nothing."""
    for process in _below(pid):
        with contextlib.suppress(OSError):
            if _heeds_stacks_signal(process):
                os.kill(process, STACKS_SIGNAL)
                await asyncio.sleep(_APART_S)


def _below(pid: int) -> list[int]:
    """Children of a process, and theirs."""
    children: dict[int, list[int]] = {}
    for path in _PROC.glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            children.setdefault(int(_said(path, "PPid")), []).append(int(path.parent.name))
    found = [pid]
    for process in found:
        found += children.get(process, [])
    return found[1:]


def _heeds_stacks_signal(pid: int) -> bool:
    """Whether a process has a handler for it: any other would end, as Python's own helpers would."""
    return bool(int(_said(_PROC / str(pid) / "status", "SigCgt"), 16) >> (STACKS_SIGNAL - 1) & 1)


def _said(path: Path, name: str) -> str:
    """What the kernel says of a process under a name; 0 where it says nothing."""
    lines = (line.partition(":") for line in path.read_text(errors="replace").splitlines())
    return next((value.strip() for key, _, value in lines if key == name), "0")


if __name__ == "__mp_main__":
    die_with_parent(parent=int(os.environ[PARENT]))
    # Of what the engine spawns in turn.
    os.environ[PARENT] = str(os.getpid())
    os.setpgrp()
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    # Runs after vLLM has ended, which has the collector look at everything again.
    collector.skip_at_exit()
    if os.environ.get("TINSMITH_LOG_FORMAT") == "json":
        logs.configure(os.environ.get("TINSMITH_ID", "sampler"), "json")
