"""Whether a gateway can do what it is asked.

Invariant: however often it is asked, Redis is asked once a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import redis.asyncio
from redis.exceptions import OutOfMemoryError, RedisError

from services.common.contract.errors import Unavailable
from services.common.state import keys

_EVERY_S = 1.0
_DEADLINE_S = 3.0
_KEPT_S = 60


class Readiness:
    """Looks whether Redis answers, and takes writes.

    Args:
        trouble: what else stands in the way, in words; empty: nothing.
    """

    def __init__(self, client: redis.asyncio.Redis, gateway_id: str, trouble: Callable[[], str]) -> None:
        self._redis = client
        self._other_trouble = trouble
        self._key = keys.gateway_probe(gateway_id)
        self._looked = float("-inf")
        self._trouble = ""
        self._looking = asyncio.Lock()

    async def check(self) -> None:
        """
        Raises:
            Unavailable: requests would come to nothing.
        """
        async with self._looking:
            if asyncio.get_running_loop().time() - self._looked >= _EVERY_S:
                self._trouble = await self._look()
                self._looked = asyncio.get_running_loop().time()
        if self._trouble:
            raise Unavailable(f"the state store takes no writes: {self._trouble}")
        if trouble := self._other_trouble():
            raise Unavailable(trouble)

    async def _look(self) -> str:
        try:
            async with asyncio.timeout(_DEADLINE_S):
                await self._redis.set(self._key, "1", ex=_KEPT_S)
        except OutOfMemoryError:
            # Results are given out all the same, and that makes room.
            return ""
        except TimeoutError:
            return f"no answer within {_DEADLINE_S:g} s"
        except (RedisError, OSError) as error:
            return type(error).__name__
        return ""
