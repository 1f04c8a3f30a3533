"""Samples that are moved to newer weights or ended, with what the engine answers when it is interrupted."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.common.contract.errors import Internal, SnapshotNotFound
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

    async def in_engine(self) -> None:
        await self.engine.entered.wait()
        self.engine.entered.clear()

    def move(self, weights: SnapshotKey | None) -> None:
        self.samples.move(JOB.request_id, weights)

    async def only(self, running: asyncio.Task[SampleOutput]) -> tuple[str, list[tuple[int, int]]]:
        """How the sequence ended and which weights made it; nothing is held afterwards."""
        (sequence,) = (await running).sequences
        held = (self.samples.running, self.admission.taken, self.admission.waiting, self.snapshots.held)
        assert held == (0, 0, 0, 0)
        return sequence.stop_reason, [(span.version, span.tokens) for span in sequence.versions]


@pytest.fixture
def sampler(tmp_path: Path) -> Sampler:
    return Sampler(tmp_path)


async def test_a_moved_sample_leaves_its_weights_and_goes_on_with_the_newer_ones(sampler: Sampler) -> None:
    running = sampler.start()
    await sampler.in_engine()
    sampler.move(NEW)
    await sampler.in_engine()
    assert sampler.snapshots.held == 1
    sampler.engine.finish("length")
    assert await sampler.only(running) == ("length", [(1, 1), (2, 1)])


@pytest.mark.parametrize("weights", [OLD, OTHER, None, SnapshotKey("model", 0)])
async def test_only_newer_weights_of_its_own_model_move_a_sample(
    sampler: Sampler, weights: SnapshotKey | None
) -> None:
    running = sampler.start()
    await sampler.in_engine()
    sampler.move(weights)
    assert not sampler.engine.turn.is_set()
    sampler.engine.finish("stop")
    assert await sampler.only(running) == ("stop", [(1, 1)])


async def test_a_sample_that_does_not_move_finishes_where_it_is(sampler: Sampler) -> None:
    running = sampler.start(dataclasses.replace(JOB, moves=False))
    await sampler.in_engine()
    sampler.move(NEW)
    assert not sampler.engine.turn.is_set()
    sampler.engine.finish("length")
    assert await sampler.only(running) == ("length", [(1, 1)])


async def test_a_sample_that_waits_for_weights_goes_to_the_newer_ones_at_once(sampler: Sampler) -> None:
    sampler.snapshots.opened[OLD].clear()
    running = sampler.start()
    await asyncio.sleep(0)
    assert sampler.admission.waiting == 1
    sampler.move(NEW)
    await sampler.in_engine()
    sampler.engine.finish("length")
    assert await sampler.only(running) == ("length", [(2, 1)])
    assert sampler.snapshots.used == [2]


async def test_a_sample_that_waits_while_newer_weights_come_and_come_gets_a_token_in_between(
    sampler: Sampler,
) -> None:
    sampler.snapshots.opened[NEW].clear()
    sampler.snapshots.opened[NEWER].clear()
    running = sampler.start()
    await sampler.in_engine()
    sampler.move(NEW)
    while sampler.snapshots.held:  # noqa: ASYNC110
        await asyncio.sleep(0)
    sampler.move(NEWER)
    for _ in range(10):
        await asyncio.sleep(0)
    sampler.move(NEWEST)
    for _ in range(10):
        await asyncio.sleep(0)
    assert sampler.snapshots.used == [1], "it gave up one wait for newer weights, and not a second"
    sampler.snapshots.opened[NEWER].set()
    await sampler.in_engine()
    await sampler.in_engine()
    sampler.engine.finish("length")
    assert await sampler.only(running) == ("length", [(1, 1), (3, 1), (4, 1)])
    assert sampler.engine.at_once == [False, False]


async def test_weights_that_a_sample_waited_for_in_vain_are_passed_over_for_newer_ones(
    sampler: Sampler,
) -> None:
    sampler.snapshots.opened[NEW].clear()
    sampler.snapshots.opened[NEWER].clear()
    running = sampler.start()
    await sampler.in_engine()
    sampler.move(NEW)
    while sampler.snapshots.held:  # noqa: ASYNC110
        await asyncio.sleep(0)
    sampler.move(NEWER)
    for _ in range(10):
        await asyncio.sleep(0)
    sampler.move(NEWEST)
    sampler.snapshots.missing.add(NEWER)
    sampler.snapshots.opened[NEWER].set()
    await sampler.in_engine()
    sampler.engine.finish("length")
    assert await sampler.only(running) == ("length", [(1, 1), (4, 1)])


async def test_a_sample_goes_on_with_its_own_weights_when_newer_ones_are_not_to_be_had(
    sampler: Sampler,
) -> None:
    sampler.snapshots.missing.add(NEW)
    running = sampler.start()
    await sampler.in_engine()
    sampler.move(NEW)
    await sampler.in_engine()
    sampler.engine.finish("length")
    assert await sampler.only(running) == ("length", [(1, 2)])


async def test_a_sample_whose_first_weights_are_not_to_be_had_fails_for_that_reason(sampler: Sampler) -> None:
    sampler.snapshots.missing.add(OLD)
    with pytest.raises(SnapshotNotFound):
        await sampler.start()
    assert sampler.admission.taken == 0


async def test_an_ended_sample_is_what_it_has_come_to(sampler: Sampler) -> None:
    running = sampler.start()
    await sampler.in_engine()
    sampler.samples.end(JOB.request_id)
    sampler.move(NEW)
    assert await sampler.only(running) == ("cancelled", [(1, 1)])
    assert sampler.engine.at_once == [True]


async def test_an_ended_sample_that_waits_for_newer_weights_is_what_its_old_ones_made(
    sampler: Sampler,
) -> None:
    sampler.snapshots.opened[NEW].clear()
    running = sampler.start()
    await sampler.in_engine()
    sampler.move(NEW)
    while sampler.snapshots.held:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert sampler.admission.waiting == 1
    sampler.samples.end(JOB.request_id)
    assert await sampler.only(running) == ("cancelled", [(1, 1)])


async def test_a_sample_that_is_ended_before_it_began_has_no_tokens(sampler: Sampler) -> None:
    sampler.snapshots.opened[OLD].clear()
    running = sampler.start()
    await asyncio.sleep(0)
    sampler.samples.end(JOB.request_id)
    assert await sampler.only(running) == ("cancelled", [])


async def test_a_sequence_that_the_engine_ends_by_itself_is_an_error(sampler: Sampler) -> None:
    running = sampler.start()
    await sampler.in_engine()
    sampler.engine.finish("cancelled")
    with pytest.raises(Internal, match="by itself"):
        await running


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_sample_that_keeps_its_keys_and_values_stays_in_the_engine_and_shifts_to_newer_weights(
    sampler: Sampler,
) -> None:
    running = sampler.start(KEPT)
    await sampler.in_engine()
    for weights in (NEW, OLD, NEWER):
        sampler.move(weights)
        await settled()
    assert sampler.engine.shifted == [2, 3]
    assert sampler.engine.at_once == [], "nothing is interrupted"
    sampler.engine.finish("length")
    await sampler.only(running)
    assert sampler.snapshots.used == [1, 2, 3]


async def test_a_sample_that_keeps_its_keys_and_values_goes_on_while_it_waits_and_then_to_the_newest(
    sampler: Sampler,
) -> None:
    sampler.snapshots.opened[NEW].clear()
    running = sampler.start(KEPT)
    await sampler.in_engine()
    for weights in (NEW, NEWER, NEWEST):
        sampler.move(weights)
        await settled()
    assert (sampler.engine.shifted, running.done()) == ([], False)
    sampler.snapshots.opened[NEW].set()
    await settled()
    assert sampler.engine.shifted == [2, 4], "what it waited for, and then the newest"
    sampler.engine.finish("length")
    await sampler.only(running)


async def test_a_sample_that_keeps_its_keys_and_values_passes_over_weights_that_are_not_to_be_had(
    sampler: Sampler,
) -> None:
    sampler.snapshots.missing.add(NEW)
    running = sampler.start(KEPT)
    await sampler.in_engine()
    sampler.move(NEW)
    await settled()
    sampler.move(NEWER)
    await settled()
    assert sampler.engine.shifted == [3]
    sampler.engine.finish("stop")
    assert (await sampler.only(running))[0] == "stop"


async def test_a_shift_that_fails_ends_no_sample_and_is_the_last(
    sampler: Sampler, caplog: pytest.LogCaptureFixture
) -> None:
    sampler.engine.refuses = Internal("it failed in the engine")
    running = sampler.start(KEPT)
    await sampler.in_engine()
    for weights in (NEW, NEWER):
        sampler.move(weights)
        await settled()
    sampler.engine.finish("length")
    assert (await sampler.only(running))[0] == "length"
    assert "does not move to newer weights: model@2: it failed in the engine" in caplog.text
    assert "model@3" not in caplog.text, "it has some of both, and gets no third"


async def test_a_sample_that_keeps_its_keys_and_values_ends_with_what_it_has_come_to(
    sampler: Sampler,
) -> None:
    running = sampler.start(KEPT)
    await sampler.in_engine()
    sampler.snapshots.opened[NEW].clear()
    sampler.move(NEW)
    await settled()
    sampler.samples.end(KEPT.request_id)
    assert await sampler.only(running) == ("cancelled", [(1, 1)])
    assert (sampler.engine.at_once, sampler.engine.shifted) == ([True], [])


async def test_under_a_sample_of_all_weights_of_a_model_these_are_replaced_and_the_engine_shifts_nothing(
    sampler: Sampler,
) -> None:
    sampler.snapshots.adapters = False
    running = sampler.start(KEPT)
    await sampler.in_engine()
    for weights in (NEW, NEWER):
        sampler.move(weights)
        await settled()
    assert (sampler.engine.shifted, sampler.engine.at_once) == ([], [])
    sampler.engine.finish("length")
    await sampler.only(running)
    assert sampler.snapshots.used == [1, 2, 3]


async def test_a_sample_that_waits_for_all_weights_of_a_model_is_given_the_newest_that_have_come_meanwhile(
    sampler: Sampler,
) -> None:
    sampler.snapshots.adapters = False
    sampler.snapshots.opened[NEW].clear()
    running = sampler.start(KEPT)
    await sampler.in_engine()
    for weights in (NEW, NEWER):
        sampler.move(weights)
        await settled()
    sampler.engine.finish("length")
    await sampler.only(running)
    assert sampler.snapshots.used == [1, 3]


async def test_a_sample_whose_weights_are_said_to_be_there_and_are_waited_for_all_the_same_can_be_ended(
    sampler: Sampler,
) -> None:
    sampler.snapshots.opened[OLD].clear()
    sampler.snapshots.ready = True
    running = sampler.start()
    await settled()
    sampler.samples.end(JOB.request_id)
    assert await sampler.only(running) == ("cancelled", [])
