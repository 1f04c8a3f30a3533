"""What vLLM's workers say of their jobs, by themselves: each has a connection to this process.

The workers are on the machine of the front end, as with vLLM's executors of one and of several processes,
the only ones that a sampler starts. They connect while the engine is set up, to a socket in a directory that
is for this user alone and is gone afterwards; what comes is plain JSON.

Invariants: an outcome that comes between `expected` and its end is not lost, whoever waits by then. A worker
whose connection ends is a worker that ends: whoever waits is told so, and so is everybody later.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import msgspec

from services.common.contract.errors import DeadlineExceeded, Internal, Unavailable
from services.common.process.tasks import cancel_all
from services.sampler.worker.jobs import REPORT_BYTES, Outcome, Report

log = logging.getLogger(__name__)

ENDED = "the engine ended; the sampler is restarting, try again"


class _Awaited:
    """What is known of a job that somebody waits for."""

    def __init__(self) -> None:
        self.outcomes: dict[int, Outcome] = {}
        self.changed = asyncio.Event()


class Reports:
    """The connections of one engine's workers.

    Args:
        workers: how many there are; their ranks count up from 0.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._ranks: set[int] = set()
        self._connected = asyncio.Event()
        self._awaited: dict[str, _Awaited] = {}
        self._readers: set[asyncio.Task[None]] = set()
        self.broken = False
        """Whether a connection has ended."""

    @asynccontextmanager
    async def listening(self, seconds: float) -> AsyncIterator[str]:
        """Yields the path that all workers are to connect to meanwhile.

        Raises:
            DeadlineExceeded: one of them has not, in this time after the end.
        """
        # For this user alone: mkdtemp makes it so.
        directory = Path(tempfile.mkdtemp(prefix="tinsmith-"))
        path = str(directory / "jobs")
        try:
            server = await asyncio.start_unix_server(self._take, path, limit=REPORT_BYTES)
            try:
                yield path
                async with asyncio.timeout(seconds):
                    await self._connected.wait()
            except TimeoutError as error:
                missing = sorted(set(range(self.workers)) - self._ranks)
                raise DeadlineExceeded(f"the workers {missing} did not connect in {seconds:.0f} s") from error
            finally:
                server.close()
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    @contextmanager
    def expected(self, job: str) -> Iterator[Callable[[], Awaitable[list[Outcome]]]]:
        """From here on what workers say of a job is kept. Yields what waits until all have said it, and gives
        their outcomes in order of rank.

        Raises:
            Unavailable: a worker ended, before or while that waits.
        """
        awaited = self._awaited[job] = _Awaited()

        async def reported() -> list[Outcome]:
            while len(awaited.outcomes) < self.workers:
                if self.broken:
                    raise Unavailable(ENDED)
                awaited.changed.clear()
                await awaited.changed.wait()
            return [awaited.outcomes[rank] for rank in range(self.workers)]

        try:
            yield reported
        finally:
            del self._awaited[job]

    async def close(self) -> None:
        """Ends the connections."""
        await cancel_all(self._readers)

    def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._read(reader, writer), name="reports of a worker")
        self._readers.add(task)
        task.add_done_callback(self._readers.discard)

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            first = await self._next(reader)
            if first is not None:
                self._ranks.add(first.rank)
                if self._ranks >= set(range(self.workers)):
                    self._connected.set()
            while (report := await self._next(reader)) is not None:
                # What nobody waits for any more was forgotten.
                if (awaited := self._awaited.get(report.job)) is not None:
                    awaited.outcomes[report.rank] = list(report.outcome)
                    awaited.changed.set()
        except Exception as error:
            log.warning("a worker's reports cannot be read: %s", error)
        finally:
            writer.close()
            self._break()

    async def _next(self, reader: asyncio.StreamReader) -> Report | None:
        line = await reader.readline()
        if not line.endswith(b"\n"):
            return None
        report = msgspec.json.decode(line, type=Report)
        if not 0 <= report.rank < self.workers:
            raise Internal(f"a worker says that it is of rank {report.rank}, of {self.workers}")
        return report

    def _break(self) -> None:
        self.broken = True
        for awaited in self._awaited.values():
            awaited.changed.set()
