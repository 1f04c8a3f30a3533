"""Dispatch leases: which gateway sends a model's operations.

Invariant: every change of holder, and every change of the trainer under one holder, comes with a higher
fencing epoch; a holder that could not renew in time stops before another may start. Where clocks fail it,
the epoch still fences.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable

import redis.asyncio
from prometheus_client import Counter
from redis.exceptions import RedisError

from services.common.process.periodic import Periodic
from services.common.state import keys
from services.common.state.scripts import Script
from services.common.telemetry.repeats import Repeats

log = logging.getLogger(__name__)

LOST = Counter("tinsmith_leases_lost_total", "Leases on models that this gateway could not renew")

TTL_S = 6.0
_REDIS = "Redis"


class Lease:
    """A lease as its holder sees it."""

    def __init__(self, model_id: str, epoch: int, valid_until: float) -> None:
        self.model_id = model_id
        self.epoch = epoch
        self.valid_until = valid_until
        """Event-loop time up to which nobody else can hold the lease."""
        self.lost = False
        self.on_lost: Callable[[], None] = lambda: None

    @property
    def surely_held(self) -> bool:
        """Whether nobody else can hold it now, so that nobody else resolves what the holder is about to."""
        return not self.lost and asyncio.get_running_loop().time() < self.valid_until

    def lose(self) -> None:
        """The holder must stop."""
        if not self.lost:
            self.lost = True
            self.on_lost()


class Leases:
    """The leases that one gateway holds.

    Args:
        gateway_id: a gateway that starts anew takes over at once what it held under this id.
    """

    def __init__(self, client: redis.asyncio.Redis, gateway_id: str, ttl: float = TTL_S) -> None:
        self._ttl = ttl
        self._prefix = f"{gateway_id}/"
        self._holder = self._prefix + uuid.uuid4().hex
        self._acquire = Script(client, "acquire_lease")
        self._renew = Script(client, "renew_lease")
        self._held: dict[str, Lease] = {}
        self._renewed: float | None = None
        self._unrenewed = Repeats(log, "leases on models are lost")
        self._unreturned = Repeats(log, "leases could not be given back and will expire")
        self._renewals = Periodic("lease renewal", ttl / 3, self._renew_all, deadline=ttl)

    def __len__(self) -> int:
        return len(self._held)

    def start(self) -> None:
        self._renewals.start()

    async def stop(self) -> None:
        """Gives all leases back."""
        await self._renewals.stop()
        await asyncio.gather(*(self.release(lease) for lease in list(self._held.values())))

    async def acquire(self, model_id: str, only_with_work: bool = False) -> Lease | float | None:
        """The lease; or seconds until the holder's may end; or None when there is no work.

        Raises:
            redis.exceptions.RedisError: Redis does not answer.
        """
        asked = asyncio.get_running_loop().time()
        reply = await self._acquire(
            [keys.lease(model_id), keys.epoch(model_id), keys.journal_pending(model_id)],
            self._holder,
            self._prefix,
            int(self._ttl * 1000),
            int(only_with_work),
        )
        if reply[0] == b"idle":
            return None
        if reply[0] == b"held":
            return max(0.0, reply[1] / 1000)
        lease = self._held[model_id] = Lease(model_id, reply[1], asked + self._ttl)
        return lease

    async def fence(self, lease: Lease) -> None:
        """Gives a held lease a higher epoch: what works under the one so far changes nothing any more.
        A lease that another gateway has taken is lost.

        Raises:
            redis.exceptions.RedisError: Redis does not answer.
        """
        renewed = await self.acquire(lease.model_id) if self._held.get(lease.model_id) is lease else None
        if not isinstance(renewed, Lease):
            lease.lose()
            return
        self._held[lease.model_id] = lease
        lease.epoch, lease.valid_until = renewed.epoch, renewed.valid_until

    async def release(self, lease: Lease) -> None:
        """Gives a lease back, so that the next holder need not wait."""
        if self._held.get(lease.model_id) is lease:
            del self._held[lease.model_id]
        lease.lose()
        try:
            await self._renew([keys.lease(lease.model_id)], self._holder, 0)
        except RedisError as error:
            self._unreturned.failed(_REDIS, error)
        else:
            self._unreturned.over(_REDIS)

    @property
    def unrenewed(self) -> float:
        """Seconds since all leases were last renewed or given up; 0 before the first time."""
        return 0.0 if self._renewed is None else asyncio.get_running_loop().time() - self._renewed

    async def _renew_all(self) -> None:
        answered = await asyncio.gather(*(self._renew_one(lease) for lease in list(self._held.values())))
        if answered and all(answered):
            self._unrenewed.over(_REDIS)
        self._renewed = asyncio.get_running_loop().time()

    async def _renew_one(self, lease: Lease) -> bool:
        """Whether Redis answered."""
        loop = asyncio.get_running_loop()
        asked = loop.time()
        try:
            async with asyncio.timeout(max(0.0, lease.valid_until - asked)):
                renewed = await self._renew([keys.lease(lease.model_id)], self._holder, int(self._ttl * 1000))
        except (RedisError, OSError, TimeoutError) as error:
            if loop.time() >= lease.valid_until - self._ttl / 3:
                # A gateway has many models; an outage of Redis is one of all of them.
                self._unrenewed.failed(_REDIS, f"{error}" or "it did not answer in time")
                self._lost(lease)
            return False
        if renewed:
            lease.valid_until = asked + self._ttl
        else:
            self._lost(lease)
        return True

    def _lost(self, lease: Lease) -> None:
        if self._held.get(lease.model_id) is lease:
            del self._held[lease.model_id]
            LOST.inc()
        lease.lose()
