"""How full Redis is.

Invariant: a gateway works only with a Redis that never evicts; and it stops accepting before such a Redis
has to refuse what it is told.
"""

from __future__ import annotations

import logging

import redis.asyncio

from services.common.contract.errors import Unavailable
from services.common.process.periodic import Periodic
from services.common.state.room import ACCOUNT, Room
from services.common.state.scripts import Script

log = logging.getLogger(__name__)

_LOOK_S = 1.0
_DEADLINE_S = 30.0


class RedisMemory:
    """Tells the room what Redis has left, as long as its gateway lives."""

    def __init__(self, client: redis.asyncio.Redis, room: Room) -> None:
        self._redis = client
        self._room = room
        self._account = Script(client, "account")
        self._looks = Periodic("watch of the memory of Redis", _LOOK_S, self._look, _DEADLINE_S)

    async def start(self) -> None:
        """
        Raises:
            Unavailable: this Redis would throw away what was acknowledged.
        """
        info = await self._look()
        policy = str(info.get("maxmemory_policy", "noeviction"))
        if policy != "noeviction":
            raise Unavailable(
                f"Redis has maxmemory-policy {policy} and would throw away accepted requests; set "
                "maxmemory-policy noeviction"
            )
        if not int(str(info.get("maxmemory", 0))):
            log.warning("Redis has no maxmemory: set one below the memory that its machine or container has")
        log.info("requests, results and records may take %d bytes of Redis", self._room.total)
        self._looks.start()

    async def stop(self) -> None:
        await self._looks.stop()

    async def _look(self) -> dict[str, object]:
        info: dict[str, object] = await self._redis.info("memory")
        _, held, results, journals = await self._account(ACCOUNT, "*")
        self._room.note_held(int(held), int(results), int(journals))
        self._room.note_memory(int(str(info.get("used_memory", 0))), int(str(info.get("maxmemory", 0))))
        return info
