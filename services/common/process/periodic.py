"""Work that a process does again and again in the background.

Invariants: a step never overlaps itself, and none is waited for longer than its deadline. A step that fails
is counted and followed by the next one; the first failure of a streak is logged, and so is its end. Only
cancellation and what no later step would be spared end the work, the latter with the process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from prometheus_client import Counter, Gauge
from redis.exceptions import RedisError

from services.common.contract.errors import TinsmithError
from services.common.process.tasks import cancel_all, keep_running

log = logging.getLogger(__name__)

FAILURES = Counter("tinsmith_periodic_failures_total", "Steps of background work that failed", ["work"])
IN_A_ROW = Gauge(
    "tinsmith_periodic_failures_in_a_row", "Steps of background work that failed since one did not", ["work"]
)

_EXPECTED = (TinsmithError, RedisError, OSError)
"""What the world does to a step. Anything else is a mistake of the program, and is logged with its place."""


class Periodic:
    """One step, repeated from `start` to `stop`.

    Args:
        name: of the work, for the log.
        seconds: between the end of a step and the begin of the next one. The first begins at once.
        step: what to do.
        deadline: seconds after which a step is cancelled, and has failed.

    Attributes:
        failures_in_a_row: steps that failed since one did not.
    """

    def __init__(
        self, name: str, seconds: float, step: Callable[[], Awaitable[object]], deadline: float
    ) -> None:
        self.name = name
        self.failures_in_a_row = 0
        self._seconds = seconds
        self._step = step
        self._deadline = deadline
        self._task: asyncio.Task[None] | None = None
        # Of a series that comes with the first failure, no rate would tell that one.
        FAILURES.labels(name)
        IN_A_ROW.labels(name)

    def start(self) -> None:
        self._task = keep_running(self._repeat(), name=self.name)

    async def stop(self) -> None:
        """Returns when no step runs any more. Without effect before `start`."""
        await cancel_all([self._task])
        self._streak(0)

    async def _repeat(self) -> None:
        while True:
            await self._once()
            await asyncio.sleep(self._seconds)

    async def _once(self) -> None:
        limit = asyncio.timeout(self._deadline)
        try:
            async with limit:
                await self._step()
        except MemoryError:
            raise
        except Exception as error:
            FAILURES.labels(self.name).inc()
            self._streak(self.failures_in_a_row + 1)
            if self.failures_in_a_row == 1:
                why = f"it took longer than {self._deadline:g} s" if limit.expired() else str(error)
                place = None if isinstance(error, _EXPECTED) else error
                log.warning(
                    "%s failed, again in %g s: %s",
                    self.name,
                    self._seconds,
                    why or repr(error),
                    exc_info=place,
                )
            return
        if self.failures_in_a_row:
            log.info("%s works again, after %d failures", self.name, self.failures_in_a_row)
            self._streak(0)

    def _streak(self, failures: int) -> None:
        # Works of one name, such as renewals of one kind, are one series.
        IN_A_ROW.labels(self.name).inc(failures - self.failures_in_a_row)
        self.failures_in_a_row = failures
