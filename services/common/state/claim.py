"""One process for each id of a service: whoever starts under an id claims it first.

Invariant: while a process keeps its claim, no other one gets past `take` under its id. One whose claim ran
out while it was stopped, and was taken, ends itself.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import redis.asyncio
from redis.exceptions import RedisError

from services.common.contract.errors import Conflict
from services.common.process import clock
from services.common.process.periodic import Periodic
from services.common.state import keys, redis_client, versions
from services.common.state.scripts import Script

log = logging.getLogger(__name__)

TTL_S = 6.0
"""A restart waits for so long when nobody can say that the process before it is gone."""
_LOOK_S = 0.25
ELSEWHERE_S = 300.0
"""A process of another machine is waited for so long: a cluster starts the next one while it still drains."""


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """Who claims an id.

    Attributes:
        machine: the running kernel and its namespace of process ids; empty = not known.
        started: when the process started, in the kernel's ticks.
    """

    instance: str = msgspec.field(default_factory=lambda: uuid.uuid4().hex)
    machine: str
    pid: int
    started: int


def this_process() -> Process:
    """This process, under a new instance."""
    return Process(machine=_machine(), pid=os.getpid(), started=_started(os.getpid()) or 0)


def is_gone(process: Process) -> bool:
    """Whether a process certainly does not run any more."""
    return process.machine == _machine() != "" and _started(process.pid) != process.started


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _started(pid: int) -> int | None:
    """When a process of this machine started; None when there is no such process."""
    try:
        # The name, in parentheses, may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])


def _end_this_process() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class Claim:
    """The claim of this process on an id.

    Args:
        kind: of the service, as in ServiceRecord.
        ttl: seconds for which the claim lives without a renewal.
        lost: called when another process has the claim; by default this one ends.
        elsewhere: seconds for which a process of another machine is waited for.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        kind: str,
        service_id: str,
        ttl: float = TTL_S,
        lost: Callable[[], None] = _end_this_process,
        elsewhere: float = ELSEWHERE_S,
    ) -> None:
        self._name = f"{kind} {service_id!r}"
        self._key = keys.claim(kind, service_id)
        self._ttl = ttl
        self._lost = lost
        self._elsewhere = elsewhere
        self._me = msgspec.json.encode(this_process())
        self._claim = Script(client, "claim")
        self._release = Script(client, "renew_lease")
        self._renewals = Periodic(f"claim on {service_id}", ttl / 3, self._renew, deadline=ttl)

    async def take(self) -> None:
        """Claims the id, and keeps the claim until `give_back`. What is left of a process that was killed is
        waited for, at most for the claim's life; a process of another machine, at most `ELSEWHERE_S`.

        Raises:
            Conflict: another process runs under this id.
            RedisError: Redis does not answer.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        gone = b""
        waits = False
        while holder := await self._ask(gone):
            other = msgspec.json.decode(holder, type=Process)
            gone = holder if is_gone(other) else b""
            if gone:
                continue
            near = other.machine == _machine()
            if not near and not waits:
                waits = True
                log.warning("waiting for the %s of another machine to end (pid %d)", self._name, other.pid)
            if loop.time() > began + (self._ttl * 4 / 3 if near else self._elsewhere):
                raise Conflict(
                    f"another process runs as {self._name} (pid {other.pid}); give this one another --id, or "
                    "stop that one"
                )
            await asyncio.sleep(_LOOK_S)
        self._renewals.start()

    async def give_back(self) -> None:
        """Ends the claim, so that a successor need not wait for it."""
        await self._renewals.stop()
        try:
            await self._release([self._key], self._me, 0)
        except RedisError as error:
            log.warning("could not give up the claim on %s, it will expire: %s", self._name, error)

    async def _ask(self, gone: bytes = b"") -> bytes:
        reply: bytes = await self._claim([self._key], self._me, round(self._ttl * 1000), gone)
        return reply

    async def _renew(self) -> None:
        if await self._ask():
            log.critical("another process has taken over as %s; stopping", self._name)
            self._lost()


@asynccontextmanager
async def claimed(redis_url: str, kind: str, service_id: str) -> AsyncIterator[redis.asyncio.Redis]:
    """Redis, once it answers, for the one process of an id, whose release works with what is there. Its clock
    is known from then on.

    Raises:
        Conflict: another process has this id, or Redis has state of a release too far from this one.
        RedisError: Redis does not answer.
    """
    client = redis_client.connect(redis_url)
    try:
        await redis_client.until_there(client)
        claim = Claim(client, kind, service_id)
        await claim.take()
        try:
            await versions.join(client)
            clock.hear(await redis_client.time_of(client))
            yield client
        finally:
            await claim.give_back()
    finally:
        await client.aclose()
