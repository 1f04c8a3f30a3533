"""Whether the engine is stuck: a pure decision, and the task that asks the engine for what decides it.

A process that died is noticed by itself; one that hangs in a kernel, in a lock or in its scheduler answers
nothing, and its requests would wait until their deadline, and then the next ones.

Invariant: an engine that finishes a step, or has nothing to do and answers, at least once in the limit is
never called stuck; any other is, within one more look.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from services.common.process.tasks import cancel_all
from services.common.telemetry.repeats import Repeats

if TYPE_CHECKING:
    from services.sampler.engine.engine import Engine

log = logging.getLogger(__name__)

_SILENT = Repeats(log, "it is not known how many steps were done")

_LOOKS_PER_LIMIT = 10
_LONGEST_PAUSE_S = 5.0


class Progress:
    """When an engine last made progress. Times are seconds of one monotonic clock.

    Args:
        limit: an engine that makes none for this long is stuck.
    """

    def __init__(self, limit: float, now: float) -> None:
        self._limit = limit
        self._since = now
        self._steps = -1

    def note(self, running: int, steps: int | None, now: float) -> None:
        """What a look at the engine showed.

        Args:
            running: requests in the engine.
            steps: steps that it has finished since it started; None = it has not answered.
        """
        if steps is not None and (not running or steps != self._steps):
            self._since = now
            self._steps = steps

    def stuck(self, now: float) -> bool:
        """Whether it made no progress for the limit."""
        return now - self._since >= self._limit


async def until_stuck(engine: Engine, limit: float) -> None:
    """Returns when the engine has made no progress for `limit` seconds."""
    progress = Progress(limit, time.monotonic())
    asked: asyncio.Task[int] | None = None
    try:
        while not progress.stuck(time.monotonic()):
            if asked is None:
                asked = asyncio.create_task(engine.steps(), name="steps of the engine")
            pause = min(limit / _LOOKS_PER_LIMIT, _LONGEST_PAUSE_S)
            await asyncio.wait({asked}, timeout=pause)
            if asked.done():
                # An engine at rest makes no steps, and has to answer all the same.
                running = 0 if engine.at_rest else engine.running
                progress.note(running, _answer(asked), time.monotonic())
                asked = None
                await asyncio.sleep(pause)
    finally:
        await cancel_all([asked])


def _answer(asked: asyncio.Task[int]) -> int | None:
    try:
        return asked.result()
    except Exception as error:
        _SILENT.failed("the engine", error)
        return None
