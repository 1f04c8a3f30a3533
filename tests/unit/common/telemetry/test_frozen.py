"""A process whose loop stands still for good ends; one that was stopped as a whole does not."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time

from services.common.telemetry.frozen import EXIT_STATUS, FrozenLoop

FREEZES = """
import asyncio, threading
from services.common.telemetry.frozen import FrozenLoop

async def main():
    await FrozenLoop(turn=0.02, most=10).start()
    print("watched", flush=True)
    threading.Event().wait()

asyncio.run(main())
"""

LIVES = """
import asyncio, sys
from services.common.telemetry.frozen import FrozenLoop

async def main():
    watch = FrozenLoop(turn=0.02, most=150)
    await watch.start()
    print("watched", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await watch.stop()

asyncio.run(main())
"""


def started(program: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "watched\n"
    return process


def test_a_process_whose_loop_stands_still_tells_where_and_ends() -> None:
    process = started(FREEZES)
    _, told = process.communicate(timeout=60)
    assert process.returncode == EXIT_STATUS
    assert "threading" in told and "in main" in told


def test_a_process_that_was_stopped_as_a_whole_goes_on() -> None:
    process = started(LIVES)
    process.send_signal(signal.SIGSTOP)
    # Longer than what it would give a loop.
    time.sleep(4.0)
    process.send_signal(signal.SIGCONT)
    process.communicate("\n", timeout=60)
    assert process.returncode == 0


async def test_a_loop_that_turns_is_left_alone() -> None:
    ended = threading.Event()
    watch = FrozenLoop(turn=0.05, most=50, end=ended.set)
    await watch.start()
    # For more than 50 turns.
    await asyncio.sleep(4)
    await watch.stop()
    assert not ended.is_set()
