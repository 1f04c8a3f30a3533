"""The weights below every adapter as the front end sees them: whose they are, and how they are replaced.

Invariant: what enters the engine enters under the name of the weights that compute it. Weights are replaced
between two steps, with the engine at rest; where that breaks off under requests, the engine stays at rest
until whole weights are in, and for ever where workers that were given up may still be at its weights.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Literal

from vllm.v1.engine.exceptions import EngineDeadError

from services.common.contract.errors import DeadlineExceeded, Internal, Unavailable
from services.sampler.engine.calls.reports import ENDED
from services.sampler.engine.calls.workers import CALL_S, NotStarted, Unfinished, Workers
from services.sampler.engine.runs import Runs
from services.sampler.engine.shifts.full_core import UPDATE
from services.sampler.engine.snapshot_key import SnapshotKey, Weights


@contextlib.contextmanager
def _ended() -> Iterator[None]:
    try:
        yield
    except EngineDeadError as error:
        raise Unavailable(ENDED) from error


class ModelWeights:
    """The weights of one engine.

    Args:
        llm: vLLM's AsyncLLM.
        calls: its workers.
        runs: its jobs.
        dead: whether the engine's process is gone.

    Attributes:
        present: whose they are.
        at_rest: the engine makes no steps, as they are looked at or replaced.
    """

    def __init__(self, llm: Any, calls: Workers, runs: Runs, dead: Callable[[], bool]) -> None:
        self._llm = llm
        self._calls = calls
        self._runs = runs
        self._dead = dead
        self.present: Weights = None
        self.at_rest = False

    async def check(self, source: int | str, seconds: float) -> None:
        """As Engine.check_weights."""
        async with self._stopped("keep", seconds):
            await self._run("tinsmith_check", source, seconds)

    async def swap(self, weights: Weights, source: int | str | None, seconds: float) -> None:
        """As Engine.swap_weights."""
        # A request that was given up a moment ago may still be in a step: the pause waits for it.
        async with self._stopped("wait", seconds):
            await self._run("tinsmith_swap", source, seconds)
            self.present = weights

    async def update(self, weights: SnapshotKey, source: int | str | None, seconds: float) -> None:
        """As Engine.update_weights."""
        await self._pause("keep", seconds)
        await self._run("tinsmith_swap", source, seconds)
        former, self.present = self.present, weights
        self._runs.take(weights.version)
        # No other task runs before this is sent, as none does from a request's name to its way to the core:
        # what entered before has the old name there, and gets the new one; what enters later has it.
        await self._tell(str(former), str(weights), weights.version)
        await self._resume()

    async def _run(self, method: str, source: int | str | None, seconds: float) -> None:
        try:
            await self._calls.run(method, (source,), seconds)
        except NotStarted as error:
            raise Unfinished(error.message) from error

    @contextlib.asynccontextmanager
    async def _stopped(self, mode: Literal["keep", "wait"], seconds: float) -> AsyncIterator[None]:
        """The engine at rest, which goes on afterwards if its workers have ended what they were told."""
        try:
            await self._pause(mode, seconds)
            yield
        except (Unfinished, asyncio.CancelledError):
            raise
        except BaseException:
            await self._resume()
            raise
        await self._resume()

    async def _tell(self, *arguments: str | int) -> None:
        try:
            async with asyncio.timeout(CALL_S):
                await self._llm.engine_core.call_utility_async(UPDATE, *arguments)
        except TimeoutError as error:
            raise DeadlineExceeded(f"the engine did not answer {UPDATE} in {CALL_S:.0f} s") from error
        except Exception as error:
            if self._dead():
                raise Unavailable(ENDED) from error
            raise Internal(f"{UPDATE} failed in the engine: {error}") from error

    async def _pause(self, mode: Literal["keep", "wait"], seconds: float) -> None:
        with _ended():
            try:
                async with asyncio.timeout(seconds):
                    await self._llm.pause_generation(mode=mode, clear_cache=False)
            except TimeoutError as error:
                raise DeadlineExceeded(f"the engine did not come to rest in {seconds:.0f} s") from error
        self.at_rest = True

    async def _resume(self) -> None:
        if not self._dead():
            with _ended():
                try:
                    async with asyncio.timeout(CALL_S):
                        await self._llm.resume_generation()
                except TimeoutError as error:
                    raise Unfinished(f"the engine did not go on in {CALL_S:.0f} s") from error
            self.at_rest = False
