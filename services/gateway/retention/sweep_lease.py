"""Which gateway sweeps.

Invariant: at most one gateway holds a lease of a name, but for the moment in which it runs out. A sweep may
be done twice with the same effect, so the lease only saves work.
"""

from __future__ import annotations

import redis.asyncio

from services.common.state.scripts import Script

_LEASE_MS = 60_000


class SweepLease:
    """A lease that the gateway which sweeps takes anew before each sweep.

    Args:
        key: of the lease in Redis.
        gateway_id: stable over restarts of the gateway, so that it finds its own lease again.
    """

    def __init__(self, client: redis.asyncio.Redis, key: str, gateway_id: str) -> None:
        self._key = key
        self._gateway_id = gateway_id
        self._claim = Script(client, "claim")

    async def take(self) -> bool:
        """Whether this gateway is the one that sweeps, for the next minute."""
        return not await self._claim([self._key], self._gateway_id, _LEASE_MS, "")
