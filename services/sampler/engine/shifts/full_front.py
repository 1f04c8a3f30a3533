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

    async def stage(
        self, stage_id: int | None, epoch: int, specs: list[list[Any]], checksum: int, seconds: float
    ) -> None:
        """Receives a full model over the weight group into each worker's host memory.

        Args:
            stage_id: what to keep it under; None = take part, and keep nothing.
            specs: [name, dtype, shape] of each tensor of the stream.

        Raises:
            DataLoss, DeadlineExceeded.
        """
        await self._calls.run("tinsmith_stage", (stage_id, epoch, specs, checksum, seconds), seconds)

    async def drop_staged(self, stage_ids: list[int]) -> None:
        """Frees staged weights, at some later time if the workers do not answer."""
        await self._calls.free("tinsmith_drop_staged", stage_ids)

    async def check(self, source: int | str, seconds: float) -> None:
        """Whether weights fit this model; none is replaced. What runs stands still meanwhile.

        Args:
            source: id of staged weights, or a model's directory.

        Raises:
            InvalidRequest: they do not.
            SnapshotNotFound, DataLoss: the directory is not whole.
            Unfinished: as `swap`.
        """
        async with self._stopped("keep", seconds):
            await self._run("tinsmith_check", source, seconds)

    async def swap(self, weights: Weights, source: int | str | None, seconds: float) -> None:
        """Replaces the engine's weights. The caller sees to it that no request runs.

        After an error the engine's weights are undefined until a swap succeeds.

        Args:
            weights: what they are of.
            source: as of `check`, which they passed; None = the base model's own files.

        Raises:
            Unfinished: workers may be at it for as long as they live, also where it began on some of several
                alone; the engine makes no step any more.
        """
        # A request that was given up a moment ago may still be in a step: the pause waits for it.
        async with self._stopped("wait", seconds):
            await self._run("tinsmith_swap", source, seconds)
            self.present = weights

    async def update(self, weights: SnapshotKey, source: int | str | None, seconds: float) -> None:
        """Replaces a full model's weights under the requests that run, all of this model, by newer ones. They
        go on with these, and keep their keys and values. Arguments are those of `swap`.

        After an error the engine's weights are undefined and it makes no step until a swap succeeds, before
        which the caller ends what runs.
        """
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
