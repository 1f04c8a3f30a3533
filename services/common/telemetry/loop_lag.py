"""How long the event loop of a process stood still.

Invariant: every time that the loop ran nothing for longer than the threshold is counted, whoever is to blame:
code that does not wait, a thread that keeps the interpreter's lock, or a machine that gives the process no
CPU. A busy machine does not fill the log: the first stall is told, each that is twice as long as any before,
and where they go on one in ten minutes.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio.events import TimerHandle
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from prometheus_client import Counter

from services.common.telemetry.frozen import FrozenLoop
from services.common.telemetry.repeats import SAY_AGAIN_S

log = logging.getLogger(__name__)

STALLS = Counter("tinsmith_loop_stalls_total", "Times that the event loop stood still for over 50 ms")
STALLED = Counter("tinsmith_loop_stalled_seconds_total", "Seconds that it stood still for in all")

THRESHOLD_S = 0.05
_EVERY_S = 0.02


@dataclass(frozen=True)
class Lag:
    """Times that the loop stood still since the process began.

    Attributes:
        times: how often.
        seconds: for how long in all.
        longest: the longest of them, in seconds.
    """

    times: int = 0
    seconds: float = 0.0
    longest: float = 0.0


@asynccontextmanager
async def watched_loop() -> AsyncIterator[LoopLag]:
    """Within it stalls of this loop are counted, and one that does not end ends the process."""
    lag, frozen = LoopLag(), FrozenLoop()
    await lag.start()
    await frozen.start()
    try:
        yield lag
    finally:
        await frozen.stop()
        await lag.stop()


class LoopLag:
    """Looks at the loop from `start` to `stop`."""

    def __init__(self) -> None:
        self.seen = Lag()
        self._timer: TimerHandle | None = None
        self._log_after = 0.0
        self._logged = 0.0
        """The longest that was told."""

    async def start(self) -> None:
        self._look_at(asyncio.get_running_loop().time() + _EVERY_S)

    async def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look_at(self, due: float) -> None:
        loop = asyncio.get_running_loop()

        def look() -> None:
            now = loop.time()
            if now - due > THRESHOLD_S:
                self._count(now - due, now)
            self._look_at(now + _EVERY_S)

        self._timer = loop.call_at(due, look)

    def _count(self, late: float, now: float) -> None:
        STALLS.inc()
        STALLED.inc(late)
        seen = self.seen
        self.seen = Lag(seen.times + 1, seen.seconds + late, max(seen.longest, late))
        if now >= self._log_after or late >= 2 * self._logged:
            log.warning(
                "the event loop stood still for %.0f ms (%d times, %.1f s in all, %.0f ms at most)",
                late * 1e3,
                self.seen.times,
                self.seen.seconds,
                self.seen.longest * 1e3,
            )
            self._log_after, self._logged = now + SAY_AGAIN_S, self.seen.longest
