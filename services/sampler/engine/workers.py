"""Calls of our methods on all of vLLM's workers, and the jobs that run there.

Invariants: a deadline is kept here and never by vLLM's executor. Its workers' answers are told apart by
their order alone: one that the executor stopped waiting for would be taken for that of the next call, and
the engine would end. A job takes effect on all workers or on none: it is finished when every worker is done,
and forgotten otherwise, also when its caller went away.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from services.common.contract import errors
from services.common.contract.errors import DeadlineExceeded, Internal, Unavailable
from services.common.process.tasks import cancel_all

log = logging.getLogger(__name__)

CALL_S = 60.0
_POLL_S = 0.002
# A worker answers between two steps; those of a tensor-parallel engine wait for it.
_POLL_MAX_S = 0.5

ENDED = "the engine ended; the sampler is restarting, try again"

Rpc = Callable[..., Awaitable[list[Any]]]
"""(method, args=arguments) -> the answer of each worker."""


class Workers:
    """All workers of one engine.

    Args:
        rpc: AsyncLLM.collective_rpc.
        dead: whether the engine's process is gone.
        seconds: deadline of one call.
    """

    def __init__(self, rpc: Rpc, dead: Callable[[], bool], seconds: float = CALL_S) -> None:
        self._rpc = rpc
        self._dead = dead
        self._seconds = seconds
        self._numbers = itertools.count()
        self._cleanups: set[asyncio.Task[None]] = set()

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        """The answer of each worker, in order of rank.

        Raises:
            Unavailable: the engine died.
            DeadlineExceeded: it has not answered in time; the call may still take place.
            Internal: the method failed on a worker.
        """
        if self._dead():
            raise Unavailable(ENDED)
        try:
            async with asyncio.timeout(self._seconds):
                return list(await self._rpc(method, args=arguments))
        except TimeoutError as error:
            raise DeadlineExceeded(f"the workers did not answer {method} in {self._seconds:.0f} s") from error
        except Exception as error:
            if self._dead():
                raise Unavailable(ENDED) from error
            raise Internal(f"{method} failed on a worker: {error}") from error

    async def run(self, method: str, arguments: tuple[Any, ...], seconds: float) -> int:
        """Runs a job on every worker: starts it, waits until it is done on all, has it take effect.

        Args:
            seconds: how long the job itself may take.

        Returns:
            The largest result of a worker.

        Raises:
            TinsmithError: as `call`, or what the job failed with on a worker.
        """
        job = f"{method}-{next(self._numbers)}"
        finished = False
        try:
            async with asyncio.timeout(seconds + self._seconds):
                await self.call(method, job, *arguments)
                _raise_first(await self._until_done(job))
                outcomes = await self.call("tinsmith_finish", job)
                finished = True
            _raise_first(outcomes)
        except TimeoutError as error:
            raise DeadlineExceeded(f"{method} did not finish in {seconds:.0f} s") from error
        finally:
            if not finished and not self._dead():
                self._own(self._forget(job))
        return max(outcome[1] for outcome in outcomes)

    async def close(self) -> None:
        """Ends the clean-ups that go on."""
        await cancel_all(self._cleanups)

    async def _until_done(self, job: str) -> list[list[Any]]:
        pause = _POLL_S
        while True:
            outcomes = await self.call("tinsmith_poll", job)
            if all(outcome is not None for outcome in outcomes):
                return outcomes
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, _POLL_MAX_S)

    async def _forget(self, job: str) -> None:
        try:
            await self.call("tinsmith_forget", job)
        except errors.TinsmithError as error:
            log.warning("job %s may be kept on a worker: %s", job, error)

    def _own(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs a clean-up that must not die with the call that caused it."""
        task = asyncio.create_task(work)
        self._cleanups.add(task)
        task.add_done_callback(self._cleanups.discard)


def _raise_first(outcomes: list[list[Any]]) -> None:
    for outcome in outcomes:
        if outcome[0] == "error":
            raise errors.by_code(*outcome[1:])
