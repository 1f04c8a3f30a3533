"""Turns of the trainers of one base model at sending weights to its samplers.

Invariant: while Redis answers, one trainer at a time forms a weight group and sends to it, so no two of them
wait for samplers that the other one has.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import redis.asyncio

from services.common.state import keys
from services.common.state.kept_lease import KeptLease

_TTL_S = 10.0
_RENEW_S = 2.5
_PATIENCE_S = 30.0
_LOOK_S = 0.05


class Turn:
    """The turns of one trainer.

    Args:
        patience: seconds for which it waits for another trainer.
    """

    def __init__(self, client: redis.asyncio.Redis, base_model: str, patience: float = _PATIENCE_S) -> None:
        name = keys.weight_turn(base_model)
        self._lease = KeptLease(client, name, uuid.uuid4().hex, _TTL_S, "turn at sending weights")
        self._patience = patience

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[bool]:
        """Waits for the turn and keeps it meanwhile; yields whether it came.

        Raises:
            RedisError: Redis does not answer.
        """
        until = time.monotonic() + self._patience
        while not await self._lease.take():
            if time.monotonic() > until:
                yield False
                return
            await asyncio.sleep(_LOOK_S)
        try:
            # Who lost the turn sends to the end: samplers take what they receive before they go elsewhere.
            async with self._lease.kept(_RENEW_S):
                yield True
        finally:
            await self._lease.give_back()
