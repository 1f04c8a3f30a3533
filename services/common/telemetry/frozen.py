"""Ends a process whose event loop stands still for good.

A loop that runs nothing answers no probe, renews no lease and hears no signal: only a thread can tell.

Invariants: a process that was stopped as a whole, or that a busy machine gives no CPU, is left alone, because
the thread counts its own turns and not the time. Before the process ends, the log has where all its threads
are.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import sys
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

TURN_S = 1.0
MOST_TURNS = 120
"""Turns of the thread without one of the loop. Longer than any lease, and than any step that holds the
interpreter's lock for a while."""
EXIT_STATUS = 70


def _end() -> None:
    log.critical("the event loop has stood still for %d s; ending this process", MOST_TURNS * TURN_S)
    faulthandler.dump_traceback(sys.stderr, all_threads=True)
    sys.stderr.flush()
    # Nothing that wants the loop, or a thread that it stands still in, can end in order.
    os._exit(EXIT_STATUS)


class FrozenLoop:
    """Watches the loop that it is started in, from `start` to `stop`.

    Args:
        turn: seconds between two looks of the thread.
        most: looks in a row without a turn of the loop that end the process.
        end: what is done then.
    """

    def __init__(self, turn: float = TURN_S, most: int = MOST_TURNS, end: Callable[[], None] = _end) -> None:
        self._turn, self._most, self._end = turn, most, end
        self._stopped = threading.Event()
        self._beat = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="loop watch", daemon=True)

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Returns at once; the thread ends at its next turn."""
        self._stopped.set()

    def _watch(self) -> None:
        missed = 0
        while not self._stopped.wait(self._turn):
            if missed == 0 or self._beat.is_set():
                missed = 0
                self._beat.clear()
                try:
                    self._loop.call_soon_threadsafe(self._beat.set)
                except RuntimeError:
                    return  # The loop is closed.
            missed += 1
            if missed > self._most:
                self._end()
                return
