"""Snapshots in the engine: one load for many waiters, nothing left behind by failures."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.common.errors import DataLoss, Internal, InvalidRequest, SnapshotNotFound
from services.common.paths import DataDir
from services.sampler.convert import IncomingSnapshot, TensorSpec
from services.sampler.residency import Residency
from services.sampler.sampling import SnapshotKey
from services.sampler.snapshots import NotInGroup, Snapshots

KEY = SnapshotKey("session:train:0", 3)
OTHER = SnapshotKey("session:train:0", 4)
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
    for key in (KEY, OTHER):
        directory = data_dir.snapshot(key.model_id, key.version)
        directory.mkdir(parents=True)
        (directory / "adapter_config.json").write_text("{}")
    return Snapshots(engine, data_dir, Residency(10, first_adapter_id=100))


async def use(snapshots: Snapshots, key: SnapshotKey = KEY) -> int:
    async with snapshots.use(key) as adapter_id:
        return adapter_id


async def test_many_requests_for_an_absent_snapshot_load_it_once(
    engine: Engine, snapshots: Snapshots
) -> None:
    assert await asyncio.gather(*(use(snapshots) for _ in range(8))) == [100] * 8
    assert engine.loads == [100]
    assert snapshots.resident() == [KEY]


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
