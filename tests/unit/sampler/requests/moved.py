"""A sampler whose engine makes a token for every interruption, to move samples to newer weights with."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from services.common.contract.errors import SnapshotNotFound
from services.common.process.crashes import CrashLedger
from services.sampler.engine.sampling import (
    Limits,
    SampleJob,
    SampleOutput,
    SamplingParams,
    Sequence,
    Tell,
    VersionSpan,
    begun,
    joined,
)
from services.sampler.engine.snapshot_key import Adapter, SnapshotKey
from services.sampler.requests.admission import Admission, Capacity
from services.sampler.requests.samples import Samples
from services.sampler.requests.suspects import Suspects
from services.sampler.snapshots.held import Held

OLD, NEW, NEWER, NEWEST = (SnapshotKey("model", version) for version in (1, 2, 3, 4))
OTHER = SnapshotKey("another", 9)
JOB = SampleJob("session:sample:0:1", OLD, [1, 2, 3], 1, SamplingParams(max_tokens=8), moves=True)


KEPT = dataclasses.replace(JOB, keeps_kv=True)


class Engine:
    """Makes a token for every interruption, and ends a sequence when it is told to."""

    limits = Limits(vocab_size=100, context_length=16, max_sequences=8)

    def __init__(self) -> None:
        self.turn = asyncio.Event()
        self.entered = asyncio.Event()
        self.reason = "length"
        self.at_once: list[bool] = []
        self.shifted: list[int] = []
        self.refuses: Exception | None = None

    async def shift(self, request_id: str, adapter: Adapter, version: int) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.shifted.append(version)

    async def sample(self, job: SampleJob, adapter: Adapter | None, tell: Tell | None = None) -> SampleOutput:
        self.reason = "length"
        self.turn.clear()
        self.entered.set()
        await self.turn.wait()
        made = Sequence(self.reason, [job.version], [-0.5], None, (VersionSpan(job.version, 1),))  # type: ignore[arg-type]
        return SampleOutput([joined(begun(job, 0), made)], 0)

    def interrupt(self, request_id: str, at_once: bool) -> None:
        self.at_once.append(at_once)
        self.finish("cancelled")

    def finish(self, reason: str) -> None:
        self.reason = reason
        self.turn.set()

    def late(self, seconds: float) -> int:
        return 0


class Snapshots:
    """Weights; some are not there yet, some never."""

    def __init__(self) -> None:
        self.missing: set[SnapshotKey] = set()
        self.failures: dict[SnapshotKey, Exception] = {}
        self.opened = {key: asyncio.Event() for key in (OLD, NEW, NEWER, NEWEST)}
        for event in self.opened.values():
            event.set()
        self.used: list[int] = []
        self.held = 0
        self.adapters = True
        self.ready = False

    def newer(self, key: SnapshotKey) -> int:
        return 0

    def is_ready(self, key: SnapshotKey | None) -> bool:
        return self.ready or (
            key not in self.missing and (key not in self.opened or self.opened[key].is_set())
        )

    @asynccontextmanager
    async def use(self, key: SnapshotKey | None) -> AsyncIterator[Held]:
        assert key is not None
        if key in self.failures:
            raise self.failures[key]
        if key in self.missing:
            raise SnapshotNotFound(f"{key} is not there")
        await self.opened[key].wait()
        if key in self.missing:
            raise SnapshotNotFound(f"{key} was lost")
        self.used.append(key.version)
        self.held += 1
        try:
            yield Held(0, Adapter(key.version, str(key), "/store") if self.adapters else None)
        finally:
            self.held -= 1

    @asynccontextmanager
    async def change(self, held: Held, key: SnapshotKey) -> AsyncIterator[Adapter]:
        if key in self.missing:
            raise SnapshotNotFound(f"{key} is not there")
        await self.opened[key].wait()
        yield Adapter(key.version, str(key), "/store")
        self.used.append(key.version)

    async def update(self, held: Held, key: SnapshotKey) -> None:
        await self.opened[key].wait()
        self.used.append(key.version)


class Sampler:
    def __init__(self, path: Path) -> None:
        self.engine, self.snapshots = Engine(), Snapshots()
        self.admission = Admission(Capacity(8, 2))
        suspects = Suspects(CrashLedger[str](path / "ledger", str, "sampler"), lambda: False)
        self.samples = Samples(self.engine, self.snapshots, self.admission, suspects)

    def start(self, job: SampleJob = JOB) -> asyncio.Task[SampleOutput]:
        return asyncio.create_task(self.samples.run(job))

    async def begun(self, job: SampleJob = JOB) -> asyncio.Task[SampleOutput]:
        """One that is in the engine."""
        running = self.start(job)
        await self.in_engine()
        return running

    async def in_engine(self) -> None:
        await self.engine.entered.wait()
        self.engine.entered.clear()

    def move(self, weights: SnapshotKey | None) -> None:
        self.samples.move(JOB.request_id, weights)

    async def move_on(self, *weights: SnapshotKey) -> None:
        """To each of these, once what the last one brought about is done."""
        for each in weights:
            self.move(each)
            await settled()

    async def left(self) -> None:
        """The sample has left its weights, and waits for others."""
        while self.snapshots.held:  # noqa: ASYNC110
            await asyncio.sleep(0)

    async def only(self, running: asyncio.Task[SampleOutput]) -> tuple[str, list[tuple[int, int]]]:
        """How the sequence ended and which weights made it; nothing is held afterwards."""
        (sequence,) = (await running).sequences
        held = (self.samples.running, self.admission.taken, self.admission.waiting, self.snapshots.held)
        assert held == (0, 0, 0, 0)
        return sequence.stop_reason, [(span.version, span.tokens) for span in sequence.versions]


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)
