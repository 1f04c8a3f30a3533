"""Work that is done once a day, whichever gateway does it.

Invariants: it is begun at most once in its deadline, and once a day when it is done. That it failed is known
to all gateways until it is begun anew: each look of theirs fails for it, so it is seen however rarely it is
begun.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import redis.asyncio

from services.common.contract.errors import Unavailable
from services.common.process.periodic import Periodic
from services.common.state.scripts import Script

_LOOK_S = 60.0
_DAY_S = 24 * 3600.0
DEADLINE_S = 6 * 3600.0
"""So long after one that broke off it is begun again."""
_WHY_CHARS = 200


class Daily:
    """One work, looked at once a minute from `start` to `stop`.

    Args:
        name: of the work, for the log.
        mark: key in Redis that is there from the begin of one to that of the next.
        work: what to do.
    """

    def __init__(
        self, client: redis.asyncio.Redis, name: str, mark: str, work: Callable[[], Awaitable[None]]
    ) -> None:
        self._redis = client
        self._mark = mark
        self._mark_daily = Script(client, "mark_daily")
        self._work = work
        self._looks = Periodic(name, _LOOK_S, self.look, DEADLINE_S)

    def start(self) -> None:
        self._looks.start()

    async def stop(self) -> None:
        await self._looks.stop()

    async def look(self) -> None:
        """Does the work if it is due.

        Raises:
            Unavailable: it failed when it was begun last, here or elsewhere.
        """
        if not await self._mark_daily([self._mark], "", round(DEADLINE_S * 1000)):
            why: Any = await self._redis.get(self._mark)
            if why:
                raise Unavailable(f"it failed when it was begun last: {why.decode()}")
            return
        try:
            await self._work()
        except Exception as error:
            failed = (str(error) or repr(error))[:_WHY_CHARS]
            await self._mark_daily([self._mark], failed, 0)
            raise
        await self._redis.pexpire(self._mark, round(_DAY_S * 1000))
