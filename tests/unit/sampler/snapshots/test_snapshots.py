"""Snapshots in the engine: one load for many waiters, nothing left behind by failures."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from services.common.contract.errors import (
    DataLoss,
    Internal,
    InvalidRequest,
    SnapshotNotFound,
)
from services.common.storage.data_dir import DataDir
from services.sampler.engine.snapshot_key import SnapshotKey
from services.sampler.snapshots.adapter_slots import AdapterSlots
from services.sampler.snapshots.full_snapshots import FullSnapshots
from services.sampler.snapshots.residency import Residency
from services.sampler.snapshots.snapshots import NotInGroup, Snapshots, StillReceiving
from services.sampler.snapshots.staging import Staging
from tests.unit.sampler.snapshots.recorded import INCOMING, KEY, OTHER, THIRD, Engine


async def use(snapshots: Snapshots, key: SnapshotKey = KEY) -> int:
    async with snapshots.use(key) as held:
        assert held.adapter is not None and held.adapter.name == str(key)
        return held.adapter.id


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
    second = asyncio.create_task(use(snapshots, OTHER))
    await until(lambda: THIRD not in snapshots.resident())
    dropping.set()
    assert sorted(await asyncio.gather(first, second)) == [101, 102]
    assert sorted(engine.loads) == [100, 101, 102]


async def until(holds: Callable[[], bool]) -> None:
    """Waits for what there is no event for."""
    async with asyncio.timeout(60):
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
    loaded, evicted = counted("arrived_total", way="store"), counted("evicted_total")
    assert [await use(snapshots, key) for key in (KEY, OTHER, KEY)] == [100, 101, 102]
    assert engine.dropped == [100, 101]
    assert counted("arrived_total", way="store") - loaded == 3
    assert counted("evicted_total") - evicted == 2
    assert REGISTRY.get_sample_value("tinsmith_adapters") == len(snapshots.resident())


def counted(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"tinsmith_adapters_{name}", labels) or 0.0


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


async def test_however_often_loads_and_transfers_fail_the_log_has_the_first_and_the_end(
    engine: Engine, snapshots: Snapshots, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for epoch in range(1, 6):
        await snapshots.join_group(epoch, 1, 2, "gloo", 5)
        engine.failure = Internal("disk")
        with pytest.raises(Internal, match="disk"):
            await use(snapshots)
        with pytest.raises(Internal, match="disk"):
            await snapshots.receive(dataclasses.replace(INCOMING, epoch=epoch))
        engine.failure = None
    await use(snapshots)
    said = [one for one in caplog.messages if "disk" in one or "no more of" in one]
    assert said == [
        f"a snapshot could not be loaded: {KEY}: disk",
        f"a snapshot did not arrive: {INCOMING.key.model_id}: disk",
        f"a snapshot could not be loaded: no more of {KEY}, after 5 failures",
    ]


async def test_a_received_snapshot_needs_no_load(engine: Engine, snapshots: Snapshots) -> None:
    await snapshots.join_group(1, 1, 2, "gloo", 5)
    received, evicted = counted("arrived_total", way="broadcast"), counted("evicted_total")
    await snapshots.receive(INCOMING)
    assert await use(snapshots) == 100
    assert engine.loads == []
    await snapshots.receive(INCOMING)
    assert engine.dropped == [101]
    assert counted("arrived_total", way="broadcast") - received == 2
    assert counted("evicted_total") == evicted


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
    assert engine.dropped == [100], "nobody had used it"


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


class Counted(Engine):
    """Has more adapters at a time than `most` at no time."""

    most = 0

    async def load_adapter(self, adapter_id: int, directory: str, seconds: float) -> int:
        self.loads.append(adapter_id)
        self.most = max(self.most, len(self.loads) - len(self.dropped))
        await asyncio.sleep(0.001)
        return 10


@pytest.mark.parametrize(("budget", "most"), [(10, 2), (40, 4), (1000, 12)])
async def test_however_many_adapters_are_wanted_no_more_are_in_memory_than_it_has_room_for_or_run_at_once(
    tmp_path: Path, budget: int, most: int
) -> None:
    engine, data_dir = Counted(), DataDir(tmp_path)
    keys = [SnapshotKey("session:train:0", version) for version in range(12)]
    for key in keys:
        stored = data_dir.snapshot(key.model_id, key.version)
        stored.mkdir(parents=True)
        (stored / "adapter_model.safetensors").write_bytes(bytes(10))
    full = FullSnapshots(engine, data_dir, Staging(20, copies=1))
    slots = AdapterSlots(2)
    snapshots = Snapshots(engine, data_dir, Residency(budget, 100, copies=1), slots, full)

    async def wanted(key: SnapshotKey) -> None:
        async with snapshots.use(key):
            await asyncio.sleep(0.002)

    async with asyncio.timeout(60):
        await asyncio.gather(*(wanted(key) for key in keys * 2))
    assert engine.most == most


async def test_an_adapter_whose_file_has_gone_is_not_looked_for_again_before_its_turn(
    engine: Engine, tmp_path: Path
) -> None:
    residency = Residency(100, 100, copies=1)
    full = FullSnapshots(engine, DataDir(tmp_path), Staging(20, copies=1))
    snapshots = Snapshots(engine, DataDir(tmp_path), residency, AdapterSlots(2), full)
    residency.wait_for(KEY, 10)
    assert residency.ahead() == [KEY]
    with pytest.raises(SnapshotNotFound):
        await snapshots._begin_load(KEY)
    await asyncio.sleep(0)
    assert residency.ahead() == []


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
    snapshots = Snapshots(
        engine, DataDir(tmp_path), Residency(10, 100, copies=1), AdapterSlots(2), full, adapts=False
    )
    with pytest.raises(InvalidRequest, match="runs no adapters") as error:
        await use(snapshots)
    assert error.value.code == "adapters_not_supported"
    await snapshots.join_group(1, 1, 2, "gloo", 5)
    await snapshots.receive(INCOMING)
    assert (engine.staged, engine.receives, engine.loads, snapshots.resident()) == ([None], [], [], [])
    async with snapshots.use(None) as held:
        assert held.adapter is None


async def test_a_version_that_was_announced_is_newer_also_before_it_arrives_and_when_it_does_not(
    engine: Engine, snapshots: Snapshots
) -> None:
    await use(snapshots, KEY)
    await snapshots.join_group(1, 1, 2, "gloo", 5)
    engine.gate.clear()
    receiving = asyncio.create_task(snapshots.receive(dataclasses.replace(INCOMING, key=OTHER)))
    await until(lambda: engine.receives != [])
    assert snapshots.newer(KEY) == 1
    engine.failure = DataLoss("checksum")
    engine.gate.set()
    with pytest.raises(DataLoss):
        await receiving
    assert (snapshots.newer(KEY), snapshots.newer(OTHER)) == (1, 0)


async def test_a_request_changes_to_another_adapter_and_lets_go_of_the_first_one(
    engine: Engine, snapshots: Snapshots
) -> None:
    async with snapshots.use(KEY) as held:
        async with snapshots.change(held, OTHER) as adapter:
            assert adapter.name == str(OTHER)
            assert snapshots.resident() == [KEY, OTHER], "both are held, whatever memory there is"
        assert held.adapter == adapter
        # There is room for one, and the first is nobody's any more.
        await use(snapshots, THIRD)
        assert snapshots.resident() == [OTHER, THIRD]
    assert engine.dropped == [100]
    assert snapshots.waiting == 0


async def test_a_request_keeps_its_adapter_and_its_slot_when_the_other_one_is_not_to_be_had(
    engine: Engine, snapshots: Snapshots
) -> None:
    async with snapshots.use(KEY) as held:
        with pytest.raises(SnapshotNotFound):
            async with snapshots.change(held, SnapshotKey("session:train:0", 9)):
                pytest.fail("it is not there")
        assert held.keys == [KEY]
        assert snapshots.waiting == 0
        async with snapshots.use(OTHER):
            waiting = asyncio.create_task(use(snapshots, THIRD))
            await until(lambda: snapshots.waiting == 1)
        await waiting


async def test_a_request_that_ends_while_it_changes_lets_go_of_both(
    engine: Engine, snapshots: Snapshots
) -> None:
    with pytest.raises(RuntimeError, match="over"):
        async with snapshots.use(KEY) as held, snapshots.change(held, OTHER):
            raise RuntimeError("over")
    await use(snapshots, THIRD)
    assert snapshots.resident() == [THIRD]
    assert engine.dropped == [100, 101]


async def test_a_request_does_not_change_to_a_full_model(snapshots: Snapshots, tmp_path: Path) -> None:
    directory = DataDir(tmp_path).snapshot(OTHER.model_id, OTHER.version)
    (directory / "config.json").write_text("{}")
    async with snapshots.use(KEY) as held:
        with pytest.raises(InvalidRequest, match="no adapter"):
            async with snapshots.change(held, OTHER):
                pytest.fail("it is all weights of a model")
