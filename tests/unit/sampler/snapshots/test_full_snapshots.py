"""Full models in the engine: put in by their first request, refused whole, made good if a swap breaks off."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.common.contract.errors import (
    DataLoss,
    Internal,
    InvalidRequest,
    SnapshotNotFound,
    Unavailable,
)
from services.common.contract.tensors import TensorSpec
from services.common.storage.data_dir import DataDir
from services.sampler.engine.calls.workers import Unfinished
from services.sampler.engine.snapshot_key import SnapshotKey, Weights
from services.sampler.snapshots.full_snapshots import FullSnapshots, GivenUp
from services.sampler.snapshots.incoming import IncomingSnapshot
from services.sampler.snapshots.snapshots import Snapshots
from tests.unit.sampler.snapshots.recorded import KEY, Engine, around

FULL, OTHER_FULL = SnapshotKey("session:train:1", 1), SnapshotKey("session:train:1", 2)


def full(key: SnapshotKey = FULL, elements: int = 4) -> IncomingSnapshot:
    """A full model of 4 bytes an element; the memory for them holds 20 bytes."""
    return IncomingSnapshot(1, key, None, (TensorSpec("a.weight", "float32", (elements,)),), 7, 5.0)


async def arrive(snapshots: Snapshots, incoming: IncomingSnapshot) -> None:
    """Over the wire, of a group that is joined for it."""
    await snapshots.join_group(1, 1, 2, "gloo", 5)
    await snapshots.receive(incoming)


def store_full(directory: Path) -> Path:
    """Has a full model lie in the store."""
    stored = DataDir(directory).snapshot(FULL.model_id, FULL.version)
    stored.mkdir(parents=True)
    (stored / "config.json").write_text("{}")
    return stored


async def sampled(snapshots: Snapshots, key: SnapshotKey | None) -> Weights:
    """Whose weights a request meets in the engine."""
    async with snapshots.use(key) as held:
        assert (held.adapter is None) == (key in (None, FULL, SnapshotKey("session:train:1", 2)))
        return snapshots.weights


async def test_a_received_full_model_is_put_into_the_engine_by_its_first_request(
    engine: Engine, snapshots: Snapshots
) -> None:
    await arrive(snapshots, full())
    assert (engine.staged, engine.swaps, snapshots.resident()) == ([1], [], [FULL])
    assert await asyncio.gather(*(sampled(snapshots, FULL) for _ in range(3))) == [FULL] * 3
    assert engine.swaps == [(FULL, 1)]


async def test_an_adapter_and_the_base_model_bring_the_base_weights_back(
    engine: Engine, snapshots: Snapshots
) -> None:
    await arrive(snapshots, full())
    wanted: list[SnapshotKey | None] = [FULL, KEY, None, FULL]
    assert [await sampled(snapshots, key) for key in wanted] == [FULL, None, None, FULL]
    assert engine.swaps == [(FULL, 1), (None, None), (FULL, 1)]


async def test_a_full_model_that_is_not_in_memory_is_read_from_the_store(
    engine: Engine, snapshots: Snapshots, tmp_path: Path
) -> None:
    directory = store_full(tmp_path)
    assert await sampled(snapshots, FULL) == FULL
    assert engine.swaps == [(FULL, str(directory))]


async def test_a_full_model_without_room_takes_part_in_the_transfer_and_is_not_kept(
    engine: Engine, snapshots: Snapshots
) -> None:
    await arrive(snapshots, full(elements=6))
    assert (engine.staged, snapshots.resident()) == ([None], [])


async def test_a_full_model_on_its_way_into_the_engine_stays_while_the_next_one_arrives(
    engine: Engine, snapshots: Snapshots
) -> None:
    await arrive(snapshots, full())
    engine.gate.clear()
    sampling = asyncio.create_task(sampled(snapshots, FULL))
    while not engine.swaps:  # noqa: ASYNC110
        await asyncio.sleep(0)
    # There is no room for both: it goes to the store alone.
    arriving = asyncio.create_task(snapshots.receive(full(SnapshotKey("session:train:1", 2))))
    await asyncio.sleep(0.05)
    assert engine.dropped_staged == []
    engine.gate.set()
    assert await sampling == FULL
    await arriving
    assert (engine.staged, engine.dropped_staged) == ([1, None], [])


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
    await arrive(snapshots, full())
    assert (engine.staged, engine.dropped_staged, snapshots.resident()) == ([1, 2], [1], [FULL])


async def test_weights_that_do_not_fit_are_refused_and_those_in_the_engine_stay(
    engine: Engine, snapshots: Snapshots
) -> None:
    await arrive(snapshots, full())
    engine.unfit = InvalidRequest("they do not fit")
    with pytest.raises(InvalidRequest, match="do not fit"):
        await sampled(snapshots, FULL)
    assert (engine.swaps, snapshots.weights) == ([], None)
    # Nobody has to wait for what is known: other requests run meanwhile.
    async with snapshots.use(None):
        with pytest.raises(InvalidRequest, match="do not fit"):
            await sampled(snapshots, FULL)
    assert (len(engine.checks), engine.swaps) == (1, [])


async def test_what_was_not_whole_when_it_was_looked_at_is_looked_at_again(
    engine: Engine, snapshots: Snapshots
) -> None:
    await arrive(snapshots, full())
    engine.unfit = SnapshotNotFound("not yet there")
    with pytest.raises(SnapshotNotFound):
        await sampled(snapshots, FULL)
    engine.unfit = None
    assert await sampled(snapshots, FULL) == FULL


async def test_a_swap_that_breaks_off_fails_its_requests_and_the_base_weights_come_back_unasked(
    engine: Engine, snapshots: Snapshots
) -> None:
    await arrive(snapshots, full())
    engine.swap_failures = [Internal("cut off")]
    with pytest.raises(Internal, match="cut off"):
        await sampled(snapshots, FULL)
    await asyncio.sleep(0.01)
    assert ([weights for weights, _ in engine.swaps], snapshots.weights) == ([FULL, None], None)
    assert await sampled(snapshots, None) is None
    assert len(engine.swaps) == 2


async def test_an_engine_without_sound_weights_says_so_and_refuses_everything(
    engine: Engine, snapshots: Snapshots, full_snapshots: FullSnapshots
) -> None:
    await arrive(snapshots, full())
    engine.swap_failures = [Internal("cut off"), Internal("gone")]
    end = asyncio.create_task(full_snapshots.until_lost())
    with pytest.raises(Internal, match="cut off"):
        await sampled(snapshots, FULL)
    await asyncio.wait_for(end, 60)
    for key in (None, FULL):
        with pytest.raises(Unavailable, match="another sampler"):
            await sampled(snapshots, key)


@pytest.mark.parametrize("what", ["looked at", "put in"])
async def test_an_engine_whose_workers_were_given_up_at_its_weights_is_lost_at_once(
    engine: Engine, snapshots: Snapshots, full_snapshots: FullSnapshots, what: str
) -> None:
    await arrive(snapshots, full())
    await snapshots.receive(full(OTHER_FULL, 1))
    gave_up = Unfinished("it did not finish")
    engine.unfit = gave_up if what == "looked at" else None
    engine.swap_failures = [gave_up] if what == "put in" else []
    async with asyncio.timeout(60):
        # All of them wait while the base model runs.
        async with snapshots.use(None):
            wanted = [asyncio.create_task(sampled(snapshots, FULL)) for _ in range(2)]
            other = asyncio.create_task(sampled(snapshots, OTHER_FULL))
            while snapshots.waiting < 3:  # noqa: ASYNC110
                await asyncio.sleep(0)
        for asked in wanted:
            with pytest.raises(GivenUp, match="did not finish"):
                await asked
        with pytest.raises(Unavailable, match="another sampler"):
            await other
        await full_snapshots.until_lost()
        with pytest.raises(Unavailable, match="another sampler"):
            await sampled(snapshots, None)
    assert len(engine.swaps) == (what == "put in"), "what the workers are at is not begun again"


async def test_a_request_that_gives_up_while_it_waits_is_forgotten(
    engine: Engine, snapshots: Snapshots
) -> None:
    await arrive(snapshots, full())
    async with snapshots.use(None):
        waiting = asyncio.create_task(sampled(snapshots, FULL))
        await asyncio.sleep(0.01)
        assert snapshots.waiting == 1
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert snapshots.waiting == 0
    assert (await sampled(snapshots, None), engine.swaps) == (None, [])


async def test_where_weights_are_quantised_full_models_are_refused_and_what_arrives_of_them_is_let_pass(
    engine: Engine, tmp_path: Path, full_snapshots: FullSnapshots
) -> None:
    snapshots = around(engine, tmp_path, full_snapshots, full_models=False)
    store_full(tmp_path)
    await arrive(snapshots, full())
    assert (engine.staged, snapshots.resident()) == ([None], [])
    with pytest.raises(InvalidRequest, match="weights are quantised") as error:
        await sampled(snapshots, FULL)
    assert error.value.code == "full_models_not_supported"
    assert engine.swaps == []
    assert await sampled(snapshots, None) is None
