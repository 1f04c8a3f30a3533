"""The sessions in which requests without one of their own are sampled.

Invariants: a request keeps the sampling session, and so the snapshot, that it began with. A session that is
here belongs to one owner and one start of one gateway; it is finished once it is idle or old and nothing runs
in it, so that what it kept is let go. One that a gateway leaves behind when it dies ends as any silent one.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from redis.exceptions import RedisError

from services.common.contract.errors import Gone, NotFound, TinsmithError
from services.common.process.periodic import Periodic
from services.gateway.sampling.accept import Sampling, Weights
from services.gateway.sessions.sessions import NewSession, Sessions

log = logging.getLogger(__name__)

TAG = "inference"
_SWEEP_S = 30.0
_SWEEP_DEADLINE_S = 60.0
_STOP_S = 5.0


@dataclass(frozen=True)
class SessionLives:
    """Seconds. `idle`: after the last request; `most`: until new requests go to another session."""

    idle: float = 600.0
    most: float = 6 * 3600.0


@dataclass(eq=False)
class _Session:
    owner: str
    session_id: str
    opened: float
    used: float
    running: int = 0
    over: bool = False
    samplers: dict[Weights, Sampler] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    """Of its sampling sessions. One whose opening broke off may exist all the same, so none is used again."""


@dataclass(frozen=True)
class Sampler:
    """A sampling session, and the numbers that its requests get."""

    sampling_session_id: str
    numbers: Iterator[int] = field(default_factory=itertools.count)


class InferenceSessions:
    """One session for each owner that infers through this gateway.

    Args:
        sessions: makes and finishes them; `sampling` opens what is sampled in them.
    """

    def __init__(
        self,
        sessions: Sessions,
        sampling: Sampling,
        lives: SessionLives | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sessions = sessions
        self._sampling = sampling
        self._lives = lives or SessionLives()
        self._clock = clock
        self._current: dict[str, _Session] = {}
        self._all: set[_Session] = set()
        self._locks: dict[str, asyncio.Lock] = {}
        self._sweeps = Periodic("inference sessions", _SWEEP_S, self.sweep, _SWEEP_DEADLINE_S)

    async def start(self) -> None:
        self._sweeps.start()

    async def stop(self) -> None:
        """Finishes what nothing runs in; the rest is left to retention."""
        await self._sweeps.stop()
        try:
            async with asyncio.timeout(_STOP_S):
                await self._finish([session for session in self._all if not session.running])
        except (TimeoutError, TinsmithError, RedisError) as error:
            log.info("inference sessions are left to end by themselves: %s", error)

    @asynccontextmanager
    async def sampler(self, owner: str, weights: Weights) -> AsyncIterator[Sampler]:
        """A sampling session on these weights, which stays until the context ends.

        Raises:
            TinsmithError: as `Sessions.create` and `Sampling.open_on`.
        """
        session = await self._open(owner)
        session.running += 1
        try:
            try:
                sampler = await self._sampler(session, weights)
            except Gone:
                self._forget(session)
                raise
            yield sampler
        finally:
            session.running -= 1
            session.used = self._clock()

    def forget(self, owner: str, sampler: Sampler) -> None:
        """Has the owner's next request begin another session, when this sampler's is still the current one;
        it was ended from outside."""
        session = self._current.get(owner)
        if session is not None and sampler in session.samplers.values():
            self._forget(session)

    def _forget(self, session: _Session) -> None:
        session.over = True
        if self._current.get(session.owner) is session:
            del self._current[session.owner]

    async def sweep(self) -> None:
        """Finishes sessions that are idle or too old, and in which nothing runs."""
        now, over = self._clock(), []
        for session in self._all:
            old = now - session.opened >= self._lives.most
            if old or session.over or now - session.used >= self._lives.idle:
                if self._current.get(session.owner) is session and (old or not session.running):
                    del self._current[session.owner]
                if not session.running:
                    over.append(session)
        await self._finish(over)
        self._locks = {name: lock for name, lock in self._locks.items() if lock.locked()}

    async def _finish(self, sessions: list[_Session]) -> None:
        for session in sessions:
            try:
                await self._sessions.finish(session.owner, session.session_id, "success", "inference is idle")
            except NotFound:
                log.info("session %s is gone already", session.session_id)
            self._all.discard(session)

    async def _open(self, owner: str) -> _Session:
        async with self._locks.setdefault(owner, asyncio.Lock()):
            session = self._current.get(owner)
            if session is None:
                new = NewSession(tags=[TAG], display_name=TAG)
                session_id = await self._sessions.create(owner, new, None)
                now = self._clock()
                session = self._current[owner] = _Session(owner, session_id, now, now)
                self._all.add(session)
            return session

    async def _sampler(self, session: _Session, weights: Weights) -> Sampler:
        async with self._locks.setdefault(session.owner, asyncio.Lock()):
            sampler = session.samplers.get(weights)
            if sampler is None:
                number = next(session.numbers)
                made = await self._sampling.open_on(session.owner, session.session_id, number, weights)
                sampler = session.samplers[weights] = Sampler(made)
            return sampler
