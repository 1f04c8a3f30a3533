"""Which gateway makes a copy of a checkpoint, however long it takes.

Invariants: while one gateway makes a copy and Redis answers, no other one makes the same, and no sweep takes
its files for what a copy that broke off left behind. What a gateway that died has begun is free within a
minute, and its files are due within an hour. One whose claim was taken meanwhile ends what it makes.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import redis.asyncio

from services.common.contract.errors import Unavailable
from services.common.process import clock
from services.common.state import keys
from services.common.state.kept_lease import KeptLease
from services.common.storage.base import Key
from services.gateway.records.checkpoint import CheckpointStore

_TTL_S = 60.0
_RENEW_S = 15.0
_LOOK_S = 0.5
_LOST_S = 3600.0
"""By then a copy that nobody makes any more has its record, or its files go."""


class CopyClaims:
    """The claims of one gateway."""

    def __init__(self, client: redis.asyncio.Redis, records: CheckpointStore) -> None:
        self._redis = client
        self._records = records
        self._renew_s = _RENEW_S
        self._holder = uuid.uuid4().hex

    async def take(self, key: Key) -> bool:
        """Whether this gateway is to make the copy, or makes it; for the next minute nobody else does."""
        return await self._lease(key).take()

    async def wait(self, key: Key) -> None:
        """Returns when no gateway makes the copy any more."""
        lease = self._lease(key)
        while await lease.is_taken():  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)

    @asynccontextmanager
    async def kept(self, key: Key) -> AsyncIterator[None]:
        """Keeps a claim that was taken, and the files that come to be.

        Raises:
            Unavailable: another gateway took the claim. What was done with it was cancelled.
        """

        async def keep_files() -> None:
            await self._records.look_again(key, clock.to_note() + _LOST_S)

        def lost() -> None:
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())

        await keep_files()
        limit = asyncio.timeout(None)
        try:
            async with limit, self._lease(key).kept(self._renew_s, keep_files, lost):
                yield
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise taken_over(key) from error

    async def give_back(self, key: Key) -> None:
        """Ends a claim of this gateway."""
        await self._lease(key).give_back()

    def _lease(self, key: Key) -> KeptLease:
        return KeptLease(self._redis, keys.copying(key.model_id), self._holder, _TTL_S, "claim of a copy")


def taken_over(key: Key) -> Unavailable:
    """What a request is told whose copy this gateway may not make any more."""
    return Unavailable(f"another gateway makes the copy to {key.model_id} now; send the same request again")
