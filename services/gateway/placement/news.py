"""Gateways tell each other where they sent what.

Invariant: a gateway tells all of its own load every TELL_S while it has any, so what is lost on the way is
told again; the blocks of a prompt it tells once. Nothing waits for it.
"""

from __future__ import annotations

import msgspec
import redis.asyncio

from services.common.process.periodic import Periodic
from services.common.state import keys
from services.gateway.placement.placements import News, Placements
from services.gateway.results.subscription import Subscription

TELL_S = 0.25
_DEADLINE_S = 5.0


class PlacementNews:
    """What keeps a gateway's placements and those of the others together."""

    def __init__(self, client: redis.asyncio.Redis, placements: Placements) -> None:
        self._redis = client
        self._placements = placements
        self._heard = Subscription(client, keys.PLACEMENT_CHANNEL, self._hear, lambda: None)
        self._told = Periodic("telling placements", TELL_S, self._tell, _DEADLINE_S)

    async def start(self) -> None:
        self._heard.start()
        self._told.start()

    async def stop(self) -> None:
        await self._told.stop()
        await self._heard.stop()

    def _hear(self, text: str) -> None:
        self._placements.hear(msgspec.json.decode(text, type=News))

    async def _tell(self) -> None:
        news = self._placements.news()
        if news is not None:
            await self._redis.publish(keys.PLACEMENT_CHANNEL, msgspec.json.encode(news))
