"""How long a model waits for operations that its client numbered and has not sent.

Invariant: the wait is counted from when some gateway first missed the operation, whoever leads the model now.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from services.common.state.journal import Journal
from services.gateway.dispatch.leases import Lease
from services.gateway.dispatch.plan import DispatchSettings, Gap, gap_reason

log = logging.getLogger(__name__)

_CHECK_S = 1.0


class GapWatch:
    """The gap that holds up one model, if any.

    Args:
        pause: says why the model's operations wait.
        settings: say after how long a gap counts as permanent, and is spoken of.
    """

    def __init__(
        self,
        lease: Lease,
        journal: Journal,
        session_finished: Callable[[str], Awaitable[bool]],
        pause: Callable[[str], Awaitable[None]],
        settings: DispatchSettings,
    ) -> None:
        self._lease = lease
        self._journal = journal
        self._session_finished = session_finished
        self._pause = pause
        self._timeout, self._patience = settings.gap_timeout, settings.gap_patience
        self._known: tuple[int, float] | None = None

    def closed(self) -> None:
        """Nothing is missing."""
        self._known = None

    async def wait_for(self, gap: Gap) -> float:
        """Seconds after which to look again; 0 once the gap was skipped, or the lease is lost."""
        left = await self._time_left(gap)
        if left is None:
            self._lease.lose()
            return 0.0
        if left > 0 and not await self._session_finished(self._lease.model_id):
            if self._timeout - left >= self._patience:
                await self._pause(gap_reason(gap, self._timeout))
            return min(_CHECK_S, left)
        log.warning(
            "operations %d to %d of %s never came; going on", gap.first, gap.last, self._lease.model_id
        )
        if not await self._journal.skip(self._lease.model_id, self._lease.epoch, gap.last):
            self._lease.lose()
        return 0.0

    async def _time_left(self, gap: Gap) -> float | None:
        """Seconds until the gap counts as permanent; None on a stale epoch."""
        now = asyncio.get_running_loop().time()
        if self._known is None or self._known[0] != gap.first:
            age = await self._journal.gap_age(self._lease.model_id, self._lease.epoch, gap.first)
            if age is None:
                return None
            self._known = (gap.first, now + self._timeout - age)
        return self._known[1] - now
