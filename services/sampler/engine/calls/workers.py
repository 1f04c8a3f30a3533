"""Calls of our methods on all of vLLM's workers, and the jobs that run there.

Invariants: a deadline is kept here and never by vLLM's executor. Its workers' answers are told apart by
their order alone: one that the executor stopped waiting for would be taken for that of the next call, and
the engine would end. A job takes effect on all workers or on none: it is finished when every worker is done,
and forgotten otherwise, also when its caller went away. What was to be freed is asked for again until the
workers did it or ended.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from services.common.contract import errors
from services.common.contract.errors import DeadlineExceeded, Internal, TinsmithError, Unavailable
from services.common.process.tasks import cancel_all
from services.common.telemetry.repeats import Repeats
from services.sampler.engine.calls.reports import ENDED, Reports

log = logging.getLogger(__name__)

CALL_S = 60.0
_AGAIN_S = 1.0
_AGAIN_MAX_S = 30.0

Rpc = Callable[..., Awaitable[list[Any]]]
"""(method, args=arguments) -> the answer of each worker."""


class Unfinished(DeadlineExceeded):
    """Workers were given up, and may still be at what they were told, or come to it."""


class NotStarted(Internal):
    """A job did not start on one of several workers: vLLM tells of the first that fails, and others may be at
    it."""


class Workers:
    """All workers of one engine.

    Args:
        rpc: AsyncLLM.collective_rpc.
        dead: whether the engine's process is gone.
        reports: what the workers say of their jobs.
        seconds: deadline of one call.
    """

    def __init__(self, rpc: Rpc, dead: Callable[[], bool], reports: Reports, seconds: float) -> None:
        self._rpc = rpc
        self._dead = dead
        self._reports = reports
        self._seconds = seconds
        self._numbers = itertools.count()
        self._owed: dict[str, list[Any]] = {}
        """What a method is still to free."""
        self._unfreed = Repeats(log, "workers did not free what they are to, and are told again")
        self._freeing: asyncio.Task[None] | None = None

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        """The answer of each worker, in order of rank.

        Raises:
            Unavailable: the engine died.
            Unfinished: it has not answered in time.
            Internal: the method failed on a worker.
        """
        if self._dead():
            raise Unavailable(ENDED)
        try:
            async with asyncio.timeout(self._seconds):
                return list(await self._rpc(method, args=arguments))
        except TimeoutError as error:
            raise Unfinished(f"the workers did not answer {method} in {self._seconds:.0f} s") from error
        except Exception as error:
            if self._dead():
                raise Unavailable(ENDED) from error
            raise Internal(f"{method} failed on a worker: {error}") from error

    async def run(self, method: str, arguments: tuple[Any, ...], seconds: float) -> int:
        """Runs a job on every worker: starts it, waits until it is done on all, has it take effect.

        Args:
            seconds: how long the job itself may take.

        Returns:
            The results of all workers together.

        Raises:
            NotStarted: it did not start on one of several workers.
            TinsmithError: as `call`, or what the job failed with on a worker.
        """
        job = f"{method}-{next(self._numbers)}"
        finished = False
        try:
            async with asyncio.timeout(seconds + self._seconds):
                with self._reports.expected(job) as reported:
                    await self._start(method, job, *arguments)
                    _raise_first(await reported())
                outcomes = await self.call("tinsmith_finish", job)
                finished = True
            _raise_first(outcomes)
        except TimeoutError as error:
            raise Unfinished(f"{method} did not finish in {seconds:.0f} s") from error
        finally:
            if not finished:
                self._owe("tinsmith_forget", [job])
        return sum(outcome[1] for outcome in outcomes)

    async def _start(self, method: str, job: str, *arguments: Any) -> None:
        try:
            await self.call(method, job, *arguments)
        except Internal as error:
            if self._reports.workers == 1:
                raise
            raise NotStarted(error.message) from error

    async def free(self, method: str, names: list[Any]) -> None:
        """Calls a method that frees what it is given the names of, and does no more when it is called twice.
        Where that fails it is called again later, until it does not or the engine ended."""
        try:
            await self.call(method, names)
        except TinsmithError as error:
            self._unfreed.failed(method, error)
            self._owe(method, names)

    async def close(self) -> None:
        """Ends what goes on here."""
        await cancel_all([self._freeing])

    def _owe(self, method: str, names: list[Any]) -> None:
        self._owed.setdefault(method, []).extend(names)
        if self._freeing is None or self._freeing.done():
            # Not with the call that caused it.
            self._freeing = asyncio.create_task(self._free_owed(), name="what workers are to free")

    async def _free_owed(self) -> None:
        pause = _AGAIN_S
        while self._owed and not self._dead():
            method = next(iter(self._owed))
            names = self._owed.pop(method)
            try:
                await self.call(method, names)
                self._unfreed.over(method)
                pause = _AGAIN_S
            except TinsmithError as error:
                self._unfreed.failed(method, error)
                self._owed.setdefault(method, []).extend(names)
                await asyncio.sleep(pause)
                pause = min(pause * 2, _AGAIN_MAX_S)


def _raise_first(outcomes: list[list[Any]]) -> None:
    for outcome in outcomes:
        if outcome[0] == "error":
            raise errors.by_code(*outcome[1:])
