"""Durable training snapshots."""

from __future__ import annotations

import asyncio
import errno
import math
import shutil
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest
from prometheus_client import REGISTRY

from services.common.contract.errors import DataLoss, Internal, ModelBusy
from services.common.storage.data_dir import DataDir
from services.trainer.compute.data import ModelState
from services.trainer.files import durable
from services.trainer.files.checkpoints import Meta, SavedState
from services.trainer.files.durable import DurableSnapshot, DurableStore
from services.trainer.files.volume import identified, volume_of
from tinsmith.v1 import checkpoints_pb2, results_pb2

MODEL = "s:train:0"
RESULT = results_pb2.OperationResult(load_state=checkpoints_pb2.LoadStateResult(path="p"))


class PointersInMemory:
    """The journal's pointer of one model, with a fencing epoch."""

    def __init__(self) -> None:
        self.epoch = 1
        self.pointer: tuple[int, str] | None = None
        self.marked: list[int] = []
        self.closed = False
        self.half_full = False

    async def mark_durable(self, model_id: str, epoch: int, seq_id: int, location: str) -> bool:
        if epoch != self.epoch:
            return False
        self.pointer = (seq_id, location)
        self.marked.append(seq_id)
        return True

    async def durable(self, model_id: str) -> tuple[int, str] | None:
        return self.pointer

    async def is_closed(self, model_id: str) -> bool:
        return self.closed

    async def is_half_full(self, model_id: str) -> bool:
        return self.half_full


class Trained:
    """A model whose newest state is of operation `seq_id`."""

    def __init__(self, state: ModelState) -> None:
        self.state = state
        self.seq_id = 0
        self.gone = False

    async def take(self, model_id: str) -> DurableSnapshot | None:
        await asyncio.sleep(0)
        if self.gone:
            return None
        meta = Meta("org/base", "org/base", model_id, self.seq_id, self.state.step, self.state.lora)
        return DurableSnapshot(SavedState(meta, self.state), {self.seq_id: RESULT})


@pytest.fixture
def trained(model_state: ModelState) -> Trained:
    return Trained(model_state)


async def answered(model_id: str) -> None:
    """All there is has its results."""


def make(
    tmp_path: Path, pointers: PointersInMemory, take: Callable[[str], Awaitable[DurableSnapshot | None]]
) -> tuple[DurableStore, list[tuple[str, int]]]:
    told: list[tuple[str, int]] = []
    store = DurableStore(
        DataDir(tmp_path),
        tmp_path / "staging",
        pointers,
        answered,
        take,
        lambda _: 1,
        lambda model, seq: told.append((model, seq)),
    )
    return store, told


async def test_the_newest_state_comes_back_with_its_results(tmp_path: Path, trained: Trained) -> None:
    store, told = make(tmp_path, PointersInMemory(), trained.take)
    assert await store.read(MODEL) is None
    trained.seq_id = 4
    store.changed(MODEL)
    await store.settle(MODEL)
    found = await store.read(MODEL)
    assert found is not None
    assert (found.seq_id, found.saved.state, found.results) == (4, trained.state, {4: RESULT})
    assert told == [(MODEL, 4)]


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


async def test_snapshots_of_the_last_seconds_are_kept_for_a_pointer_that_redis_lost(
    tmp_path: Path, trained: Trained
) -> None:
    store, _ = make(tmp_path, PointersInMemory(), trained.take)
    for seq_id in range(1, 5):
        trained.seq_id = seq_id
        store.changed(MODEL)
        await store.settle(MODEL)
    assert {path.name for path in DataDir(tmp_path).state(MODEL).iterdir()} == {"1-1", "2-1", "3-1", "4-1"}


async def test_states_that_came_and_went_are_skipped_and_old_ones_deleted(
    tmp_path: Path, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "_KEPT_S", 0.0)
    pointers = PointersInMemory()
    store, _ = make(tmp_path, pointers, trained.take)
    for seq_id in range(1, 200):
        trained.seq_id = seq_id
        store.changed(MODEL)
        await asyncio.sleep(0)
    await store.drain()
    assert pointers.marked[-1] == 199
    assert len(pointers.marked) < 100
    kept = {path.name for path in DataDir(tmp_path).state(MODEL).iterdir()}
    assert kept == {"2-1", "199-1"}, "the newest, and the one before it for a pointer that Redis lost"


async def test_a_stale_epoch_moves_no_pointer_and_deletes_nothing(tmp_path: Path, trained: Trained) -> None:
    pointers = PointersInMemory()
    store, told = make(tmp_path, pointers, trained.take)
    store.changed(MODEL)
    await store.settle(MODEL)
    pointers.epoch, trained.seq_id = 2, 9
    store.changed(MODEL)
    await store.settle(MODEL)
    assert pointers.pointer == (0, f"{volume_of(DataDir(tmp_path))}/0-1")
    assert told == [(MODEL, 0)]
    assert (await store.read(MODEL)) is not None


async def test_a_model_that_is_gone_is_not_written(tmp_path: Path, trained: Trained) -> None:
    pointers = PointersInMemory()
    store, _ = make(tmp_path, pointers, trained.take)
    trained.gone = True
    store.changed(MODEL)
    await store.settle(MODEL)
    assert pointers.marked == []


def blocked(tmp_path: Path) -> Path:
    """What keeps snapshots of the model from being written, until it is taken away."""
    blocker = DataDir(tmp_path).state(MODEL)
    blocker.parent.mkdir(parents=True)
    blocker.write_text("in the way")
    return blocker


def failures() -> float:
    return REGISTRY.get_sample_value("tinsmith_durable_snapshot_failures_total") or 0.0


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


async def test_free_bytes_of_the_volume_are_told_and_nothing_of_one_that_is_not_there(
    tmp_path: Path, trained: Trained
) -> None:
    make(tmp_path, PointersInMemory(), trained.take)
    told = REGISTRY.get_sample_value("tinsmith_volume_free_bytes")
    assert told is not None and 0 < told <= shutil.disk_usage(tmp_path).total
    make(tmp_path / "away", PointersInMemory(), trained.take)
    told = REGISTRY.get_sample_value("tinsmith_volume_free_bytes")
    assert told is not None and math.isnan(told)


async def test_a_lost_snapshot_is_reported_not_passed_over(tmp_path: Path, trained: Trained) -> None:
    pointers = PointersInMemory()
    store, _ = make(tmp_path, pointers, trained.take)
    pointers.pointer = (3, "3")
    with pytest.raises(DataLoss):
        await store.read(MODEL)


async def test_a_snapshot_on_a_volume_that_is_not_mounted_is_not_lost(
    tmp_path: Path, trained: Trained
) -> None:
    pointers, mounted = PointersInMemory(), tmp_path / "mounted"
    mounted.mkdir()
    store, _ = make(mounted, pointers, trained.take)
    store.changed(MODEL)
    await store.settle(MODEL)
    mounted.rename(tmp_path / "away")
    for make_it in (mounted.mkdir, partial(identified, DataDir(mounted))):
        make_it()
        for read in (store.read, store.meta):
            with pytest.raises(Internal, match="mount that one there") as waits:
                await read(MODEL)
            assert waits.value.code == "other_volume"
    (mounted / "volume_id").write_text(volume_of(DataDir(tmp_path / "away")) + "\n")
    with pytest.raises(DataLoss):
        await store.read(MODEL)
    shutil.rmtree(mounted)
    (tmp_path / "away").rename(mounted)
    found = await store.read(MODEL)
    assert found is not None


@pytest.mark.parametrize(
    "results", [None, b"", b"\xc1", b"\x93", msgspec.msgpack.encode({0: b"\xff"})], ids=repr
)
async def test_results_that_cannot_be_read_are_damage(
    tmp_path: Path, trained: Trained, results: bytes | None
) -> None:
    pointers = PointersInMemory()
    store, _ = make(tmp_path, pointers, trained.take)
    store.changed(MODEL)
    await store.settle(MODEL)
    assert pointers.pointer is not None
    path = DataDir(tmp_path).state(MODEL) / Path(pointers.pointer[1]).name / "results.msgpack"
    path.unlink()
    if results is not None:
        path.write_bytes(results)
    with pytest.raises(DataLoss, match=r"results.msgpack in .* is damaged"):
        await store.read(MODEL)


async def test_deletion_waits_for_what_is_being_written_and_leaves_nothing(
    tmp_path: Path, trained: Trained
) -> None:
    store, _ = make(tmp_path, PointersInMemory(), trained.take)
    store.changed(MODEL)
    await store.delete(MODEL)
    assert not DataDir(tmp_path).state(MODEL).exists()
    await store.delete(MODEL)


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
