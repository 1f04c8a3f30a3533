"""Something that one process at a time does, for as long as it takes.

Invariant: while Redis answers and the holder lives, nobody else takes the lease; of a holder that died it is
free within its time to live. A holder whose lease was taken while Redis did not answer, or it stood still, is
told so with the next renewal.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import redis.asyncio
from redis.exceptions import RedisError

from services.common.contract.errors import StaleEpoch
from services.common.process.periodic import Periodic
from services.common.state.scripts import Script

log = logging.getLogger(__name__)


class KeptLease:
    """One lease, as one holder sees it.

    Args:
        key: of the lease in Redis.
        holder: nobody else has this name.
        ttl: seconds for which the lease lives without a renewal.
        what: names leases of this kind, in the log and in metrics.
    """

    def __init__(self, client: redis.asyncio.Redis, key: str, holder: str, ttl: float, what: str) -> None:
        self._redis = client
        self._key = key
        self._holder = holder
        self._ttl = ttl
        self._what = what
        self._claim = Script(client, "claim")
        self._release = Script(client, "renew_lease")

    async def take(self) -> bool:
        """Whether it is the holder's for the next `ttl` seconds."""
        return not await self._claim([self._key], self._holder, round(self._ttl * 1000), "")

    async def is_taken(self) -> bool:
        """Whether it is anybody's."""
        return bool(await self._redis.exists(self._key))

    @asynccontextmanager
    async def kept(
        self,
        every: float,
        also: Callable[[], Awaitable[object]] | None = None,
        lost: Callable[[], None] | None = None,
    ) -> AsyncIterator[None]:
        """Renews a lease that was taken.

        Args:
            every: seconds between two renewals.
            also: done with each renewal.
            lost: called, more than once, after somebody else took the lease.
        """

        async def renew() -> None:
            if not await self.take():
                if lost is not None:
                    lost()
                raise StaleEpoch(f"somebody else took {self._key}")
            if also is not None:
                await also()

        # Not the key: each name is a series of metrics for as long as the process lives.
        renewals = Periodic(f"renewal of the {self._what}", every, renew, self._ttl)
        renewals.start()
        try:
            yield
        finally:
            await renewals.stop()

    async def give_back(self) -> None:
        """Ends the lease, if it is still the holder's."""
        try:
            await self._release([self._key], self._holder, 0)
        except RedisError as error:
            log.warning("could not give back %s, it will expire: %s", self._key, error)
