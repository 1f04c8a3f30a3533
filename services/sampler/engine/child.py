"""First module of every process that the engine spawns; see `__main__.py`.

Invariant: importing it under the name that multiprocessing gives to a child's main module ties that
process to its parent, before anything else is loaded, also when the parent has ended by then, and takes it
out of the parent's process group: Ctrl-C in a terminal reaches the parent alone, which drains before it ends
the engine. Any other import does nothing. Such a process writes where all its threads are to its log on
STACKS_SIGNAL, also when it hangs in a kernel.
"""

from __future__ import annotations

import faulthandler
import os
import signal

from services.common.process.process import die_with_parent
from services.common.telemetry import logs

STACKS_SIGNAL = signal.SIGUSR1
PARENT = "TINSMITH_PARENT"
"""The variable with the pid of the process that spawns."""

if __name__ == "__mp_main__":
    die_with_parent(parent=int(os.environ[PARENT]))
    # Of what the engine spawns in turn.
    os.environ[PARENT] = str(os.getpid())
    os.setpgrp()
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    if os.environ.get("TINSMITH_LOG_FORMAT") == "json":
        logs.configure(os.environ.get("TINSMITH_ID", "sampler"), "json")
