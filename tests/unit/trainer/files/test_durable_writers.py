"""When durable snapshots are written, and what becomes of writes that fail or hang."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from services.common.contract.errors import ModelBusy
from services.trainer.files import durable
from services.trainer.files.durable import DurableSnapshot
from tests.unit.trainer.files.durable_snapshots import (
    MODEL,
    PointersInMemory,
    Trained,
    blocked,
    failures,
    make,
)


async def test_who_does_not_want_it_any_more_does_not_wait_for_a_model_that_trains_on(
    tmp_path: Path, trained: Trained
) -> None:
    store, told = make(tmp_path, PointersInMemory(), trained.take)

    async def train() -> None:
        while True:
            trained.seq_id += 1
            store.changed(MODEL)
            await asyncio.sleep(0)

    training = asyncio.create_task(train())
    async with asyncio.timeout(60):
        while not store._writers:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await store.settle(MODEL, wanted=lambda: len(told) < 3)
    assert store._writers
    training.cancel()
    await store.settle(MODEL)


async def test_nobody_waits_for_ever_for_a_disk_that_hangs(
    tmp_path: Path, trained: Trained, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(durable, "_SETTLED_S", 0.1)
    hangs = asyncio.Event()

    async def take(model_id: str) -> DurableSnapshot | None:
        await hangs.wait()
        return await trained.take(model_id)

    store, told = make(tmp_path, PointersInMemory(), take)
    store.changed(MODEL)
    async with asyncio.timeout(60):
        assert not await store.settle(MODEL)
        with pytest.raises(ModelBusy, match="is not written yet"):
            await store.delete(MODEL)
    assert f"the snapshot of {MODEL} is still being written" in caplog.text
    hangs.set()
    monkeypatch.setattr(durable, "_SETTLED_S", 60.0)
    assert await store.settle(MODEL)
    assert told == [(MODEL, 0)]


async def test_a_write_that_failed_is_counted_and_due_until_it_succeeds(
    tmp_path: Path, trained: Trained
) -> None:
    pointers, before = PointersInMemory(), failures()
    store, _ = make(tmp_path, pointers, trained.take)
    blocker = blocked(tmp_path)
    store.changed(MODEL)
    for times in (1, 2):
        assert not await store.settle(MODEL)
        assert store.failed(MODEL)
        assert failures() - before == times
    assert pointers.marked == []
    blocker.unlink()
    assert await store.settle(MODEL)
    assert pointers.marked == [0] and not store.failed(MODEL)


async def test_however_often_a_write_fails_the_log_has_the_first_and_the_end(
    tmp_path: Path, trained: Trained, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    store, _ = make(tmp_path, PointersInMemory(), trained.take)
    blocker, before = blocked(tmp_path), failures()
    store.changed(MODEL)
    for _ in range(5):
        assert not await store.settle(MODEL)
    assert failures() - before == 5
    blocker.unlink()
    assert await store.settle(MODEL)
    first, last = caplog.messages
    assert first.startswith(f"a durable snapshot was not written: {MODEL}: ")
    assert last == f"a durable snapshot was not written: no more of {MODEL}, after 5 failures"
    assert "Traceback" not in caplog.text


async def test_a_drain_ends_though_snapshots_cannot_be_written(tmp_path: Path, trained: Trained) -> None:
    store, told = make(tmp_path, PointersInMemory(), trained.take)
    blocked(tmp_path)
    store.changed(MODEL)
    assert not await store.settle(MODEL)
    before = failures()
    async with asyncio.timeout(60):
        await store.drain()
    assert failures() - before == 1, "it was tried once more"
    assert not told


async def test_a_snapshot_that_cannot_be_written_holds_a_deletion_up_for_as_long_as_the_model_is_here(
    tmp_path: Path, trained: Trained
) -> None:
    store, _ = make(tmp_path, PointersInMemory(), trained.take)
    blocked(tmp_path)
    store.changed(MODEL)
    with pytest.raises(ModelBusy, match="has space and takes writes"):
        await store.delete(MODEL)
    trained.gone = True
    assert await store.settle(MODEL)


class FakeClockLoop(asyncio.SelectorEventLoop):
    """Time passes only while everybody sleeps, and then at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.now = max(self.now, self._scheduled[0]._when)  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


class SlowPointers(PointersInMemory):
    """Writing a snapshot takes some seconds; notes when each became durable."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.durable_at: dict[tuple[str, int], float] = {}
        self._done = asyncio.Semaphore(0)

    async def mark_durable(self, model_id: str, epoch: int, seq_id: int, location: str) -> bool:
        await asyncio.sleep(self.seconds)
        self.durable_at[model_id, seq_id] = asyncio.get_running_loop().time()
        self._done.release()
        return True

    async def until_durable(self, more: int) -> None:
        """Returns when so many more snapshots have become durable."""
        for _ in range(more):
            await self._done.acquire()


@pytest.fixture
def fake_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeClockLoop]:
    """A loop on which nothing takes time but sleeping, and files are not written."""

    async def at_once(function: Callable[..., object], *args: object) -> object:
        return function(*args)

    monkeypatch.setattr(asyncio, "to_thread", at_once)
    monkeypatch.setattr(durable, "_write_files", lambda *_: None)
    monkeypatch.setattr(durable, "_delete_older", lambda *_: None)
    loop = FakeClockLoop()
    yield loop
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


def test_tenants_that_step_together_are_durable_within_seconds(
    tmp_path: Path, trained: Trained, fake_clock: FakeClockLoop
) -> None:
    pointers = SlowPointers(seconds=0.25)
    store, _ = make(tmp_path, pointers, trained.take)
    tenants = [f"s:train:{number}" for number in range(64)]

    async def step_together() -> float:
        asked = fake_clock.time()
        trained.seq_id += 1
        for tenant in tenants:
            store.changed(tenant)
        await pointers.until_durable(len(tenants))
        return fake_clock.time() - asked

    async def train() -> list[float]:
        return [await step_together() for _ in range(3)]

    first, *later = fake_clock.run_until_complete(train())
    assert first < 10
    assert max(later) < 60


def test_writers_rest_in_proportion_to_the_write_and_not_to_the_wait_for_their_turn(
    tmp_path: Path, trained: Trained, fake_clock: FakeClockLoop
) -> None:
    pointers = SlowPointers(seconds=0.01)
    store, _ = make(tmp_path, pointers, trained.take)
    tenants = [f"s:train:{number}" for number in range(100)]

    async def train() -> float:
        for trained.seq_id in (1, 2):
            for tenant in tenants:
                store.changed(tenant)
            await asyncio.sleep(0.6)
        await asyncio.sleep(60)
        return max(pointers.durable_at.values())

    # All of the first states take 0.5 s; then each writer rests 4 x 100 x 0.01 s.
    assert fake_clock.run_until_complete(train()) < 6


def test_a_model_that_steps_all_the_time_is_written_every_five_seconds(
    tmp_path: Path, trained: Trained, fake_clock: FakeClockLoop
) -> None:
    pointers = SlowPointers(seconds=0.01)
    store, _ = make(tmp_path, pointers, trained.take)

    async def train() -> int:
        for trained.seq_id in range(600):
            store.changed(MODEL)
            await asyncio.sleep(0.1)
        return len(pointers.durable_at)

    assert fake_clock.run_until_complete(train()) == 60 / 5


def test_who_hurried_a_write_and_wants_nothing_more_hurries_no_other(
    tmp_path: Path, trained: Trained, fake_clock: FakeClockLoop
) -> None:
    # Slower than the model steps: its writer never comes to an end.
    pointers = SlowPointers(seconds=0.15)
    store, _ = make(tmp_path, pointers, trained.take)

    async def train() -> int:
        looks = iter([True, True, False])
        store.changed(MODEL)
        settling = asyncio.create_task(store.settle(MODEL, lambda: next(looks)))
        for trained.seq_id in range(600):
            store.changed(MODEL)
            await asyncio.sleep(0.1)
        assert not await settling
        return len(pointers.durable_at)

    assert fake_clock.run_until_complete(train()) < 60 / 5 + 3


def test_a_write_that_failed_is_repeated_by_itself_after_a_pause(
    tmp_path: Path, trained: Trained, fake_clock: FakeClockLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    pointers, full, tries = SlowPointers(seconds=0.01), 100.0, []

    def write(*_: object) -> None:
        tries.append(fake_clock.time())
        if fake_clock.time() < full:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(durable, "_write_files", write)
    store, _ = make(tmp_path, pointers, trained.take)

    async def train() -> None:
        store.changed(MODEL)
        await pointers.until_durable(1)

    fake_clock.run_until_complete(train())
    assert tries == [0, 30, 60, 90, 120]


def test_a_writer_whose_models_journal_is_half_full_does_not_rest(
    tmp_path: Path, trained: Trained, fake_clock: FakeClockLoop
) -> None:
    pointers = SlowPointers(seconds=5.0)
    pointers.half_full = True
    store, _ = make(tmp_path, pointers, trained.take)

    async def train() -> float:
        for trained.seq_id in (1, 2):
            store.changed(MODEL)
            await asyncio.sleep(0.1)
        await asyncio.sleep(60)
        return pointers.durable_at[MODEL, 2]

    assert fake_clock.run_until_complete(train()) < 11


async def test_what_is_durable_is_not_written_again_when_redis_goes_away_behind_it(
    tmp_path: Path, trained: Trained
) -> None:
    class GoesAway(PointersInMemory):
        async def is_half_full(self, model_id: str) -> bool:
            raise RedisConnectionError("it went away")

    pointers, before = GoesAway(), failures()
    store, told = make(tmp_path, pointers, trained.take)
    store.changed(MODEL)
    assert await store.settle(MODEL)
    assert (pointers.marked, told) == ([0], [(MODEL, 0)])
    assert failures() == before, "nothing is due"


async def test_what_is_durable_is_not_written_again_when_older_ones_cannot_be_deleted(
    tmp_path: Path, trained: Trained, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(durable, "_delete_older", fails)
    pointers, before = PointersInMemory(), failures()
    store, _ = make(tmp_path, pointers, trained.take)
    store.changed(MODEL)
    assert await store.settle(MODEL)
    assert (pointers.marked, failures()) == ([0], before)
    assert f"older durable snapshots of {MODEL} stay" in caplog.text


def test_a_write_that_hangs_is_counted_and_told_of_every_ten_minutes_until_it_ends(
    tmp_path: Path,
    trained: Trained,
    fake_clock: FakeClockLoop,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    at_once, write, counted = asyncio.to_thread, durable._write_files, failures()

    async def hangs(function: Callable[..., object], *args: object) -> object:
        if function is write:
            await asyncio.sleep(25 * 60)
        return await at_once(function, *args)

    monkeypatch.setattr(asyncio, "to_thread", hangs)
    pointers = PointersInMemory()
    store, _ = make(tmp_path, pointers, trained.take)

    async def train() -> list[float]:
        store.changed(MODEL)
        told = []
        for minutes in (9, 2, 8, 2, 10):
            await asyncio.sleep(60 * minutes)
            told.append(failures() - counted)
        return told

    # After 9, 11, 19, 21 and 31 minutes.
    assert fake_clock.run_until_complete(train()) == [0, 1, 1, 2, 2]
    assert caplog.text.count(f"the snapshot of {MODEL} is still being written after 600 s") == 2
    assert pointers.marked == [0] and not store.failed(MODEL), "it did not fail"
