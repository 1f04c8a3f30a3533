"""Snapshots in the engine: one load for many waiters, nothing left behind by failures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from services.common.contract.errors import DataLoss, Internal, InvalidRequest, SnapshotNotFound
from services.common.contract.tensors import TensorSpec
from services.common.storage.data_dir import DataDir
from services.sampler.engine.snapshot_key import SnapshotKey, Weights
from services.sampler.snapshots.adapter_slots import AdapterSlots
from services.sampler.snapshots.full_snapshots import FullSnapshots
from services.sampler.snapshots.incoming import IncomingSnapshot
from services.sampler.snapshots.residency import Residency
from services.sampler.snapshots.snapshots import NotInGroup, Snapshots, StillReceiving
from services.sampler.snapshots.staging import Staging

KEY = SnapshotKey("session:train:0", 3)
OTHER = SnapshotKey("session:train:0", 4)
THIRD = SnapshotKey("session:train:0", 5)
INCOMING = IncomingSnapshot(1, KEY, 4, (TensorSpec("lm_head.lora_A", "float32", (4, 8)),), 7, 5.0)


class Engine:
    """Records what is asked of it; `gate` holds transfers back, `failure` fails them."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.failure: Exception | None = None
        self.loads: list[int] = []
        self.receives: list[int] = []
        self.dropped: list[int] = []
        self.left = 0
        self.staged: list[int | None] = []
        self.dropped_staged: list[int] = []
        self.swaps: list[tuple[Weights, int | str | None]] = []

    async def join_group(
        self, epoch: int, first_rank: int, world_size: int, medium: str, seconds: float
    ) -> None:
        await self._transfer()

    async def leave_group(self) -> None:
        self.left += 1

    async def receive_adapter(
        self, adapter_id: int, epoch: int, rank: int, specs: list[list[object]], crc32: int, seconds: float
    ) -> int:
        self.receives.append(adapter_id)
        return await self._transfer()

    async def load_adapter(self, adapter_id: int, directory: str, seconds: float) -> int:
        self.loads.append(adapter_id)
        return await self._transfer()

    async def drop_adapters(self, adapter_ids: list[int]) -> None:
        self.dropped += adapter_ids

    async def stage_weights(
        self, stage_id: int | None, epoch: int, specs: list[list[object]], crc32: int, seconds: float
    ) -> None:
        self.staged.append(stage_id)
        await self._transfer()

    async def drop_staged(self, stage_ids: list[int]) -> None:
        self.dropped_staged += stage_ids

    async def swap_weights(self, weights: Weights, source: int | str | None, seconds: float) -> None:
        self.swaps.append((weights, source))
        await self._transfer()

    async def _transfer(self) -> int:
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        return 10


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def snapshots(engine: Engine, tmp_path: Path) -> Snapshots:
    data_dir = DataDir(tmp_path)
    for key in (KEY, OTHER, THIRD):
        directory = data_dir.snapshot(key.model_id, key.version)
        directory.mkdir(parents=True)
        (directory / "adapter_config.json").write_text("{}")
    full = FullSnapshots(engine, data_dir, Staging(20, copies=1))
    return Snapshots(engine, data_dir, Residency(10, first_adapter_id=100), AdapterSlots(2), full)


async def use(snapshots: Snapshots, key: SnapshotKey = KEY) -> int:
    async with snapshots.use(key) as adapter:
        assert adapter is not None and adapter.name == str(key)
        return adapter.id


async def test_many_requests_for_an_absent_snapshot_load_it_once(
    engine: Engine, snapshots: Snapshots
) -> None:
    assert await asyncio.gather(*(use(snapshots) for _ in range(8))) == [100] * 8
    assert engine.loads == [100]
    assert snapshots.resident() == [KEY]


async def test_snapshots_that_do_not_fit_together_do_not_evict_each_other_unused(
    engine: Engine, snapshots: Snapshots
) -> None:
    await use(snapshots, THIRD)
    # Dropping waits for a step of the engine, and the next snapshot is there before that.
    dropping = asyncio.Event()
    drop = engine.drop_adapters

    async def slowly(adapter_ids: list[int]) -> None:
        await dropping.wait()
        await drop(adapter_ids)

    engine.drop_adapters = slowly  # type: ignore[method-assign]
    first = asyncio.create_task(use(snapshots, KEY))
    await until(lambda: KEY in snapshots.resident())
    second = asyncio.create_task(use(snapshots, OTHER))
    await until(lambda: OTHER in snapshots.resident())
    dropping.set()
    assert await asyncio.gather(first, second) == [101, 102]
    assert engine.loads == [100, 101, 102]


async def until(holds: Callable[[], bool]) -> None:
    """Waits for what there is no event for."""
    async with asyncio.timeout(5):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_cancelled_request_does_not_stop_the_load_that_another_waits_for(
    engine: Engine, snapshots: Snapshots
) -> None:
    engine.gate.clear()
    first, second = (asyncio.create_task(use(snapshots)) for _ in range(2))
    await asyncio.sleep(0.05)
    first.cancel()
    engine.gate.set()
    assert await second == 100
    assert first.cancelled() or first.cancelling()
    assert engine.loads == [100]


async def test_a_snapshot_that_gave_way_is_loaded_again_under_a_new_id(
    engine: Engine, snapshots: Snapshots
) -> None:
    assert [await use(snapshots, key) for key in (KEY, OTHER, KEY)] == [100, 101, 102]
    assert engine.dropped == [100, 101]


async def test_a_snapshot_that_is_nowhere_is_not_found(snapshots: Snapshots) -> None:
    with pytest.raises(SnapshotNotFound, match="save the weights again"):
        await use(snapshots, SnapshotKey("session:train:0", 99))


async def test_an_id_that_is_no_model_id_never_becomes_a_path(snapshots: Snapshots) -> None:
    with pytest.raises(InvalidRequest):
        await use(snapshots, SnapshotKey("../../etc", 1))


async def test_a_load_that_failed_is_tried_again_by_the_next_request(
    engine: Engine, snapshots: Snapshots
) -> None:
    engine.failure = Internal("disk")
    with pytest.raises(Internal, match="disk"):
        await use(snapshots)
    engine.failure = None
    assert await use(snapshots) == 101
    assert engine.dropped == [100]


async def test_a_received_snapshot_needs_no_load(engine: Engine, snapshots: Snapshots) -> None:
    await snapshots.join_group(1, 1, 2, "gloo", 5)
    await snapshots.receive(INCOMING)
    assert await use(snapshots) == 100
    assert engine.loads == []


async def test_a_damaged_transfer_leaves_the_group_and_keeps_nothing(
    engine: Engine, snapshots: Snapshots
) -> None:
    await snapshots.join_group(1, 1, 2, "gloo", 5)
    engine.failure = DataLoss("checksum")
    with pytest.raises(DataLoss):
        await snapshots.receive(INCOMING)
    await asyncio.sleep(0)
    assert (engine.left, engine.dropped, snapshots.resident()) == (1, [100], [])
    assert snapshots.group_epoch == 0


async def test_a_cancelled_transfer_leaves_the_group(engine: Engine, snapshots: Snapshots) -> None:
    await snapshots.join_group(1, 1, 2, "gloo", 5)
    engine.gate.clear()
    task = asyncio.create_task(snapshots.receive(INCOMING))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)
    assert (engine.left, engine.dropped) == (1, [100])


async def test_transfers_run_one_after_another(engine: Engine, snapshots: Snapshots) -> None:
    await snapshots.join_group(1, 1, 2, "gloo", 5)
    engine.gate.clear()
    tasks = [asyncio.create_task(snapshots.receive(INCOMING)) for _ in range(2)]
    await asyncio.sleep(0.01)
    assert engine.receives == [100]
    engine.gate.set()
    await asyncio.gather(*tasks)
    assert engine.receives == [100, 101]
    assert engine.dropped == [101]


async def test_a_transfer_of_another_group_is_refused_before_anything_waits(
    engine: Engine, snapshots: Snapshots
) -> None:
    await snapshots.join_group(2, 1, 2, "gloo", 5)
    with pytest.raises(NotInGroup, match="join again"):
        await snapshots.receive(INCOMING)
    assert (engine.receives, snapshots.group_epoch) == ([], 2)


async def test_who_receives_for_long_joins_no_other_group_meanwhile(
    engine: Engine, snapshots: Snapshots
) -> None:
    await snapshots.join_group(1, 1, 2, "gloo", 5)
    engine.gate.clear()
    receiving = asyncio.create_task(snapshots.receive(INCOMING))
    await until(lambda: engine.receives == [100])
    with pytest.raises(StillReceiving, match="join later"):
        await snapshots.join_group(2, 1, 2, "gloo", 0.02)
    assert snapshots.group_epoch == 1
    joining = asyncio.create_task(snapshots.join_group(3, 1, 2, "gloo", 5))
    await asyncio.sleep(0.01)
    assert snapshots.group_epoch == 1
    engine.gate.set()
    await receiving
    await joining
    assert (snapshots.group_epoch, snapshots.resident()) == (3, [KEY])


async def test_a_third_adapter_waits_for_one_of_two_slots_and_is_forgotten_when_it_gives_up(
    snapshots: Snapshots,
) -> None:
    async with snapshots.use(KEY), snapshots.use(OTHER):
        waiting = asyncio.create_task(use(snapshots, THIRD))
        given_up = asyncio.create_task(use(snapshots, THIRD))
        await until(lambda: snapshots.waiting == 2)
        given_up.cancel()
        await until(lambda: snapshots.waiting == 1)
        assert await use(snapshots, KEY) == 100
        assert not waiting.done()
    assert await waiting > 100
    assert snapshots.waiting == 0


async def test_a_snapshot_is_ready_when_a_request_for_it_would_not_wait(snapshots: Snapshots) -> None:
    assert snapshots.is_ready(None) and not snapshots.is_ready(KEY)
    await use(snapshots, KEY)
    assert snapshots.is_ready(KEY)
    async with snapshots.use(OTHER), snapshots.use(THIRD):
        assert snapshots.is_ready(OTHER) and not snapshots.is_ready(KEY)


async def test_where_adapters_cannot_run_they_are_refused_and_what_arrives_of_them_is_let_pass(
    engine: Engine, tmp_path: Path
) -> None:
    full = FullSnapshots(engine, DataDir(tmp_path), Staging(20, copies=1))
    snapshots = Snapshots(engine, DataDir(tmp_path), Residency(10, 100), AdapterSlots(2), full, adapts=False)
    with pytest.raises(InvalidRequest, match="runs no adapters") as error:
        await use(snapshots)
    assert error.value.code == "adapters_not_supported"
    await snapshots.join_group(1, 1, 2, "gloo", 5)
    await snapshots.receive(INCOMING)
    assert (engine.staged, engine.receives, engine.loads, snapshots.resident()) == ([None], [], [], [])
    async with snapshots.use(None) as adapter:
        assert adapter is None


# Full models.

FULL = SnapshotKey("session:train:1", 1)


def full(key: SnapshotKey = FULL, elements: int = 4) -> IncomingSnapshot:
    """A full model of 4 bytes an element; the memory for them holds 20 bytes."""
    return IncomingSnapshot(1, key, None, (TensorSpec("a.weight", "float32", (elements,)),), 7, 5.0)


async def sampled(snapshots: Snapshots, key: SnapshotKey | None) -> Weights:
    """Whose weights a request meets in the engine."""
    async with snapshots.use(key) as adapter:
        assert (adapter is None) == (key in (None, FULL, SnapshotKey("session:train:1", 2)))
        return snapshots.weights


async def test_a_received_full_model_is_put_into_the_engine_by_its_first_request(
    engine: Engine, snapshots: Snapshots
) -> None:
    await snapshots.join_group(1, 1, 2, "gloo", 5)
    await snapshots.receive(full())
    assert (engine.staged, engine.swaps, snapshots.resident()) == ([1], [], [FULL])
    assert await asyncio.gather(*(sampled(snapshots, FULL) for _ in range(3))) == [FULL] * 3
    assert engine.swaps == [(FULL, 1)]


async def test_an_adapter_and_the_base_model_bring_the_base_weights_back(
    engine: Engine, snapshots: Snapshots
) -> None:
    await snapshots.join_group(1, 1, 2, "gloo", 5)
    await snapshots.receive(full())
    wanted: list[SnapshotKey | None] = [FULL, KEY, None, FULL]
    assert [await sampled(snapshots, key) for key in wanted] == [FULL, None, None, FULL]
    assert engine.swaps == [(FULL, 1), (None, None), (FULL, 1)]


async def test_a_full_model_that_is_not_in_memory_is_read_from_the_store(
    engine: Engine, snapshots: Snapshots, tmp_path: Path
) -> None:
    directory = DataDir(tmp_path).snapshot(FULL.model_id, FULL.version)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    assert await sampled(snapshots, FULL) == FULL
    assert engine.swaps == [(FULL, str(directory))]


async def test_a_full_model_without_room_takes_part_in_the_transfer_and_is_not_kept(
    engine: Engine, snapshots: Snapshots
) -> None:
    await snapshots.join_group(1, 1, 2, "gloo", 5)
    await snapshots.receive(full(elements=6))
    assert (engine.staged, snapshots.resident()) == ([None], [])


async def test_a_damaged_full_model_leaves_the_group_and_is_dropped_with_the_next_one(
    engine: Engine, snapshots: Snapshots
) -> None:
    await snapshots.join_group(1, 1, 2, "gloo", 5)
    engine.failure = DataLoss("checksum")
    with pytest.raises(DataLoss):
        await snapshots.receive(full())
    await asyncio.sleep(0)
    assert (engine.left, snapshots.resident()) == (1, [])
    engine.failure = None
    await snapshots.join_group(1, 1, 2, "gloo", 5)
    await snapshots.receive(full())
    assert (engine.staged, engine.dropped_staged, snapshots.resident()) == ([1, 2], [1], [FULL])


async def test_weights_that_cannot_be_put_in_fail_their_requests_alone(
    engine: Engine, snapshots: Snapshots
) -> None:
    await snapshots.join_group(1, 1, 2, "gloo", 5)
    await snapshots.receive(full())
    engine.failure = InvalidRequest("they do not fit")
    with pytest.raises(InvalidRequest, match="do not fit"):
        await sampled(snapshots, FULL)
    engine.failure = None
    assert await sampled(snapshots, None) is None
    assert [weights for weights, _ in engine.swaps] == [FULL, None]


async def test_a_request_that_gives_up_while_it_waits_is_forgotten(
    engine: Engine, snapshots: Snapshots
) -> None:
    await snapshots.join_group(1, 1, 2, "gloo", 5)
    await snapshots.receive(full())
    async with snapshots.use(None):
        waiting = asyncio.create_task(sampled(snapshots, FULL))
        await asyncio.sleep(0.01)
        assert snapshots.waiting == 1
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert snapshots.waiting == 0
    assert (await sampled(snapshots, None), engine.swaps) == (None, [])
