"""The way of a sample to the engine: what it holds, and what is refused before it costs anything."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from services.common.contract.errors import (
    Internal,
    InvalidRequest,
    Overloaded,
    SnapshotNotFound,
    Unavailable,
)
from services.common.process.crashes import CrashLedger
from services.sampler.engine.sampling import (
    Limits,
    SampleJob,
    SampleOutput,
    SamplingParams,
    Sequence,
    Tell,
    VersionSpan,
)
from services.sampler.engine.snapshot_key import Adapter, SnapshotKey
from services.sampler.requests.admission import Admission, Capacity
from services.sampler.requests.samples import Samples
from services.sampler.requests.suspects import GivenUp, Suspects
from services.sampler.snapshots.held import Held
from services.sampler.snapshots.versions import KnownVersions

JOB = SampleJob("session:sample:0:1", None, [1, 2, 3], 4, SamplingParams(max_tokens=2))
OUTPUT = SampleOutput([], 0)


class Engine:
    """Generates when `gate` is open; `failure` fails what it generates."""

    limits = Limits(vocab_size=100, context_length=16, max_sequences=8)

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.failure: Exception | None = None
        self.output = OUTPUT
        self.ran: list[str] = []
        self.not_begun = 0
        self.dead = False

    async def sample(self, job: SampleJob, adapter: Adapter | None, tell: Tell | None = None) -> SampleOutput:
        self.ran.append(job.request_id)
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        return self.output

    async def shift(self, request_id: str, adapter: Adapter, version: int) -> None:
        raise Unavailable("the engine ended")

    def late(self, seconds: float) -> int:
        return self.not_begun


class Snapshots:
    """Weights that are in the engine, or not."""

    def __init__(self) -> None:
        self.ready = asyncio.Event()
        self.ready.set()
        self.used = 0
        self.missing: set[int] = set()
        self.versions = KnownVersions()

    def newer(self, key: SnapshotKey) -> int:
        return self.versions.newer(key)

    def is_ready(self, key: SnapshotKey | None) -> bool:
        return self.ready.is_set()

    @asynccontextmanager
    async def use(self, key: SnapshotKey | None) -> AsyncIterator[Held]:
        await self.ready.wait()
        self.used += 1
        try:
            yield Held(adapter=key and Adapter(key.version, str(key), ""))
        finally:
            self.used -= 1

    @asynccontextmanager
    async def change(self, held: Held, key: SnapshotKey) -> AsyncIterator[Adapter]:
        if key.version in self.missing:
            raise SnapshotNotFound(f"no {key}")
        yield Adapter(key.version, str(key), "")


class Sampler:
    """Samples with their parts."""

    def __init__(self, path: Path) -> None:
        self.engine = Engine()
        self.snapshots = Snapshots()
        self.admission = Admission(Capacity(8, 2))
        self.ledger = path / "ledger"
        self.suspects = Suspects(CrashLedger[str](self.ledger, str, "sampler"), lambda: self.engine.dead)
        self.samples = Samples(self.engine, self.snapshots, self.admission, self.suspects)

    def holds(self) -> tuple[int, int, int, int]:
        return (self.samples.running, self.admission.taken, self.admission.waiting, self.snapshots.used)


@pytest.fixture
def sampler(tmp_path: Path) -> Sampler:
    return Sampler(tmp_path)


async def test_a_sample_that_ends_well_or_fails_holds_nothing_afterwards(sampler: Sampler) -> None:
    sampler.engine.gate.set()
    assert await sampler.samples.run(JOB) is OUTPUT
    sampler.engine.failure = Internal("a kernel failed")
    with pytest.raises(Internal):
        await sampler.samples.run(JOB)
    assert sampler.holds() == (0, 0, 0, 0)


@pytest.mark.parametrize("ready", [True, False])
async def test_a_sample_that_is_cancelled_holds_nothing_whether_it_ran_or_waited_for_its_weights(
    sampler: Sampler, ready: bool
) -> None:
    if not ready:
        sampler.snapshots.ready.clear()
    running = asyncio.create_task(sampler.samples.run(JOB))
    await asyncio.sleep(0)
    assert sampler.holds() == (1, 4, 0 if ready else 4, int(ready))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert sampler.holds() == (0, 0, 0, 0)


async def test_what_is_refused_never_reaches_the_engine(sampler: Sampler) -> None:
    with pytest.raises(InvalidRequest, match="num_samples"):
        await sampler.samples.run(dataclasses.replace(JOB, num_samples=1025))
    sampler.engine.not_begun = 3
    with pytest.raises(Overloaded, match="has not begun"):
        await sampler.samples.run(JOB)
    assert (sampler.engine.ran, sampler.holds()) == ([], (0, 0, 0, 0))


async def test_a_sample_that_ended_three_engines_is_refused_at_once_and_others_go_on(tmp_path: Path) -> None:
    for _ in range(3):
        sampler = Sampler(tmp_path)
        running = asyncio.create_task(sampler.samples.run(JOB))
        await asyncio.sleep(0)
        sampler.engine.dead = True
        sampler.engine.failure = Unavailable("the engine ended")
        sampler.engine.gate.set()
        with pytest.raises(Unavailable):
            await running
    sampler = Sampler(tmp_path)
    sampler.engine.gate.set()
    with pytest.raises(GivenUp, match="died 3 times while it executed this request") as error:
        await sampler.samples.run(JOB)
    assert (error.value.category, error.value.code) == ("server", "crashed_sampler")
    assert await sampler.samples.run(dataclasses.replace(JOB, request_id="another")) is OUTPUT
    assert (sampler.engine.ran, sampler.holds()) == (["another"], (0, 0, 0, 0))


async def test_what_reaches_an_engine_that_is_dead_already_is_not_blamed(tmp_path: Path) -> None:
    sampler = Sampler(tmp_path)
    sampler.engine.dead = True
    with pytest.raises(Unavailable, match="restarting"):
        await sampler.samples.run(JOB)
    assert sampler.engine.ran == []
    assert not CrashLedger[str](sampler.ledger, str, "sampler").is_suspect(JOB.request_id)


async def test_a_process_that_ends_in_order_leaves_no_suspects(tmp_path: Path) -> None:
    sampler = Sampler(tmp_path)
    running = asyncio.create_task(sampler.samples.run(JOB))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    sampler.suspects.close()
    assert not sampler.ledger.exists()


@pytest.mark.parametrize(("missing", "why"), [({2}, "no a@2"), (set[int](), "the engine ended")])
async def test_of_many_samples_that_keep_theirs_and_cannot_move_for_one_reason_the_log_has_one(
    sampler: Sampler, missing: set[int], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    sampler.snapshots.missing = missing
    old, new = SnapshotKey("a", 1), SnapshotKey("a", 2)
    jobs = [
        dataclasses.replace(
            JOB, request_id=f"sample-{number}", snapshot=old, num_samples=1, moves=True, keeps_kv=True
        )
        for number in range(5)
    ]
    running = [asyncio.create_task(sampler.samples.run(job)) for job in jobs]
    await asyncio.sleep(0)
    assert all(sampler.samples.move(job.request_id, new) for job in jobs)
    for _ in range(5):
        await asyncio.sleep(0)
    sampler.engine.gate.set()
    assert await asyncio.gather(*running) == [OUTPUT] * 5
    assert caplog.messages == [f"a sample does not move to newer weights: a@2: {why}"]


async def test_how_old_a_sample_is_counts_versions_that_came_while_it_ran(sampler: Sampler) -> None:
    versions = sampler.snapshots.versions
    for version in (3, 5):
        versions.note(SnapshotKey("a", version))
    moved = (VersionSpan(3, 1), VersionSpan(5, 1))
    sequences = [
        Sequence("stop", [1], [-1.0], versions=(VersionSpan(5, 1),)),
        Sequence("stop", [1, 2], [-1.0, -1.0], versions=moved),
        Sequence("stop", [], []),
    ]
    sampler.engine.output = SampleOutput(sequences, 0)
    before = lags()
    running = asyncio.create_task(sampler.samples.run(dataclasses.replace(JOB, snapshot=SnapshotKey("a", 5))))
    await asyncio.sleep(0)
    versions.note(SnapshotKey("a", 9))
    versions.note(SnapshotKey("b", 10))
    sampler.engine.gate.set()
    await running
    # Of the base model there are no versions.
    await sampler.samples.run(JOB)
    assert (lags()[0] - before[0], lags()[1] - before[1]) == (2, 1 + 2)


def lags() -> tuple[float, float]:
    """How many sequences were measured, and how many versions all of them were behind."""
    name = "tinsmith_sample_lag_versions"
    count, total = (REGISTRY.get_sample_value(f"{name}_{suffix}") for suffix in ("count", "sum"))
    assert count is not None and total is not None
    return count, total
