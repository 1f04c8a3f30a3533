"""Finds the request that brings the engine down, and lets the others go on.

When an engine dies, all that it had are under suspicion, and gateways send them again to the one that is
restarted. If they all ran together once more, all would be blamed once more. So suspects are let in a few at
a time, and one by one when they were there twice; one that has been in the engine for a while without harm
makes room for the next. Requests that are not suspected run all the time.

Invariants: what the engine has when it dies is in the ledger; a request on which three deaths in a row are
blamed is refused for an hour, by when its sample has failed; one that was not in the engine is never blamed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext

from services.common.contract.errors import Internal, Unavailable
from services.common.process.crashes import CrashLedger

SEVERAL = 32
"""Suspects of one death that are on trial at once."""

TRIAL_S = 10.0
"""What kills an engine mostly does so in its first steps."""

_FREE = nullcontext()
"""It can be entered again and again."""


class GivenUp(Internal):
    """A request that has ended the engine too often. Another try is none."""


class Suspects:
    """The requests of one engine.

    Args:
        dead: whether the engine is gone.
    """

    def __init__(
        self,
        ledger: CrashLedger[str],
        dead: Callable[[], bool],
        several: int = SEVERAL,
        trial: float = TRIAL_S,
    ) -> None:
        self._ledger = ledger
        self._dead = dead
        self._trial = trial
        self._lanes = {1: asyncio.Semaphore(several), 2: asyncio.Semaphore(1)}
        self._leave: dict[str, Callable[[], None]] = {}
        self._ended: list[str] = []

    def check(self, request_id: str) -> None:
        """
        Raises:
            GivenUp: this request has ended the engine too often.
        """
        if (verdict := self._ledger.verdict(request_id)) is not None:
            raise GivenUp(verdict.message, verdict.code)

    def turn(self, request_id: str) -> AbstractAsyncContextManager[None]:
        """Waits until the request may go to the engine; at once, unless it is a suspect."""
        lane = self._lanes.get(self._ledger.deaths(request_id))
        return _FREE if lane is None else self._trial_of(request_id, lane)

    @asynccontextmanager
    async def _trial_of(self, request_id: str, lane: asyncio.Semaphore) -> AsyncIterator[None]:
        await lane.acquire()
        held = True

        def leave() -> None:
            nonlocal held
            if held:
                held = False
                lane.release()

        self._leave[request_id] = leave
        try:
            yield
        finally:
            self._leave.pop(request_id, None)
            leave()

    @contextmanager
    def executing(self, request_id: str) -> Iterator[None]:
        """The engine has the request meanwhile.

        Raises:
            Unavailable: the engine is gone.
        """
        if self._dead():
            raise Unavailable("the engine ended; the sampler is restarting, try again")
        self._ledger.begin([request_id])
        timer = None
        if request_id in self._leave:
            timer = asyncio.get_running_loop().call_later(self._trial, self._pass, request_id)
        try:
            yield
            self._ledger.survived(request_id)
        finally:
            if timer is not None:
                timer.cancel()
            # What a dead engine had stays in the ledger, for the next process to see.
            if not self._dead():
                self._end(request_id)

    def _end(self, request_id: str) -> None:
        """A step of the engine ends many: they are written down together."""
        if not self._ended:
            asyncio.get_running_loop().call_soon(self._write_ended)
        self._ended.append(request_id)

    def _write_ended(self) -> None:
        ended, self._ended = self._ended, []
        if ended:
            self._ledger.end(ended)

    def close(self) -> None:
        """This process ends in order."""
        self._write_ended()
        self._ledger.close()

    def _pass(self, request_id: str) -> None:
        """A suspect has been in the engine for a while. It makes room for the next."""
        leave = self._leave.pop(request_id, None)
        if leave is not None and not self._dead():
            self._ledger.acquit(request_id)
            leave()
