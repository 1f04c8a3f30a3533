"""Gives weight groups up beside the event loop.

Invariants: whatever a medium does with a group that is given up, the loop goes on; how it ended is seen: one
that fails, or takes longer than its deadline, is logged and counted; and of threads that never come back
there are only so many, since no group is made any more once they are too many.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future

from prometheus_client import Counter

from services.common.process.tasks import cancel_all, detached, unheard
from services.common.process.threads import WorkerThread
from services.common.weights import WeightGroup

log = logging.getLogger(__name__)

ABORT_TIMEOUT_S = 30.0
MOST_UNDER_WAY = 16
"""Groups that may be on their way out before no new one is made."""

_CLOSE_S = 2.0
NOT_LEFT = Counter(
    "tinsmith_weight_groups_not_left_total",
    "Weight groups whose end failed, or was not there within its deadline",
    ["why"],
)


class Leaving:
    """The groups of one trainer that are on their way out, each in a thread of its own: one that is stuck
    must not hold up the next."""

    def __init__(self) -> None:
        self._watched: set[asyncio.Task[None]] = set()
        self._under_way = 0

    @property
    def has_room(self) -> bool:
        """Whether another group may be made, which will have to be left some day."""
        return self._under_way < MOST_UNDER_WAY

    def give_up(self, group: WeightGroup) -> None:
        """Aborts a group; nobody waits for it."""
        thread = WorkerThread(f"leave-{group.epoch}")
        self._under_way += 1
        ended = thread.submit(group.abort)
        thread.close()
        watched = detached(self._see(group.epoch, ended), f"leave weight group {group.epoch}")
        self._watched.add(watched)
        watched.add_done_callback(self._watched.discard)

    def give_up_once_joined(self, join: asyncio.Future[WeightGroup]) -> None:
        """The same of a group that this end still joins, in a thread that nothing interrupts."""
        self._under_way += 1
        join.add_done_callback(self._joined)

    async def close(self) -> None:
        """Waits a little for those that are under way; what is stuck ends with the process."""
        if self._watched:
            await asyncio.wait(set(self._watched), timeout=_CLOSE_S)
        await cancel_all(set(self._watched))

    async def _see(self, epoch: int, aborted: Future[None]) -> None:
        # One that fails after its deadline was told of already.
        ended = unheard(asyncio.wrap_future(aborted))
        ended.add_done_callback(self._ended)
        await asyncio.wait([ended], timeout=ABORT_TIMEOUT_S)
        if not ended.done():
            NOT_LEFT.labels("late").inc()
            log.warning("weight group %d is not left after %g s", epoch, ABORT_TIMEOUT_S)
        elif (error := ended.exception()) is not None:
            NOT_LEFT.labels("failed").inc()
            log.warning("weight group %d was not left: %s: %s", epoch, type(error).__name__, error)

    def _joined(self, join: asyncio.Future[WeightGroup]) -> None:
        self._under_way -= 1
        if not join.cancelled() and join.exception() is None:
            self.give_up(join.result())

    def _ended(self, _: asyncio.Future[None]) -> None:
        self._under_way -= 1
