"""Durable training snapshots: which are kept, and what comes back of them."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import threading
from functools import partial
from pathlib import Path

import msgspec
import pytest
from prometheus_client import REGISTRY

from services.common.contract.errors import DataLoss, Internal, StorageAway
from services.common.process.pools import Pool
from services.common.storage.data_dir import DataDir
from services.trainer.files import durable, volume
from services.trainer.files.durable import DurableSnapshot
from services.trainer.files.volume import identified, volume_of
from tests.unit.trainer.files.durable_snapshots import MODEL, RESULT, PointersInMemory, Trained, make


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


async def test_snapshots_of_the_last_seconds_are_kept_for_a_pointer_that_redis_lost(
    tmp_path: Path, trained: Trained
) -> None:
    store, _ = make(tmp_path, PointersInMemory(), trained.take)
    for seq_id in range(1, 5):
        trained.seq_id = seq_id
        store.changed(MODEL)
        await store.settle(MODEL)
    assert {path.name for path in DataDir(tmp_path).state(MODEL).iterdir()} == {"1-1", "2-1", "3-1", "4-1"}


async def test_an_old_snapshot_is_kept_while_the_pointer_has_only_just_left_it(
    tmp_path: Path, trained: Trained
) -> None:
    store, _ = make(tmp_path, PointersInMemory(), trained.take)
    for seq_id in range(1, 4):
        trained.seq_id = seq_id
        store.changed(MODEL)
        await store.settle(MODEL)
        if seq_id == 1:
            # The model rested for a while before its next two steps.
            written = DataDir(tmp_path).state(MODEL) / "1-1"
            os.utime(written, (written.stat().st_mtime - 60,) * 2)
    assert {path.name for path in DataDir(tmp_path).state(MODEL).iterdir()} == {"1-1", "2-1", "3-1"}


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


async def test_free_bytes_of_the_volume_are_told_and_nothing_of_one_that_is_not_there(
    tmp_path: Path, trained: Trained
) -> None:
    volume = tmp_path / "volume"
    make(volume, PointersInMemory(), trained.take)
    told = REGISTRY.get_sample_value("tinsmith_volume_free_bytes")
    assert told is not None and 0 < told <= shutil.disk_usage(tmp_path).total
    volume.rename(tmp_path / "away")
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


async def test_of_a_volume_that_hangs_whoever_asks_for_a_snapshot_is_told_so(
    tmp_path: Path, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = make(tmp_path, PointersInMemory(), trained.take)
    store.changed(MODEL)
    await store.settle(MODEL)
    answers, read = threading.Event(), Path.read_bytes

    def hangs(path: Path) -> bytes:
        assert answers.wait(60)
        return read(path)

    def text_hangs(path: Path, encoding: str = "", errors: str = "") -> str:
        return hangs(path).decode()

    try:
        with monkeypatch.context() as patched:
            patched.setattr(volume, "VOLUME_LOOKS", Pool("answer of the data directory", 2, 0.1))
            patched.setattr(Path, "read_bytes", hangs)
            patched.setattr(Path, "read_text", text_hangs)
            for ask in (store.meta, store.read):
                with pytest.raises(StorageAway, match="hangs: no answer of the data directory"):
                    await asyncio.wait_for(ask(MODEL), 20)
    finally:
        answers.set()
    assert await store.meta(MODEL) is not None


async def test_nothing_is_written_where_the_volume_is_not_mounted_any_more_until_it_is_back(
    tmp_path: Path, trained: Trained
) -> None:
    pointers, mounted = PointersInMemory(), tmp_path / "mounted"
    mounted.mkdir()
    store, told = make(mounted, pointers, trained.take)
    mounted.rename(tmp_path / "away")
    for make_it in (lambda: None, mounted.mkdir, partial(identified, DataDir(mounted))):
        make_it()
        store.changed(MODEL)
        assert not await store.settle(MODEL)
        assert (pointers.pointer, told) == (None, [])
        assert not DataDir(mounted).state(MODEL).exists()
    shutil.rmtree(mounted)
    (tmp_path / "away").rename(mounted)
    assert await store.settle(MODEL)
    assert await store.read(MODEL) is not None


async def test_a_copy_that_strays_from_its_journal_while_it_is_written_does_not_become_durable(
    tmp_path: Path, trained: Trained
) -> None:
    pointers, taken = PointersInMemory(), []

    async def take(model_id: str) -> DurableSnapshot | None:
        taken.append(model_id)
        return await trained.take(model_id)

    store, told = make(tmp_path, pointers, take, lambda model_id: model_id in taken)
    store.changed(MODEL)
    assert await store.settle(MODEL)
    assert (taken, pointers.pointer, told) == ([MODEL], None, [])


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
