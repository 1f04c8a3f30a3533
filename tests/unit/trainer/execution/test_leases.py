"""What a model still writes when a gateway takes its lease anew, or another trainer has taken it further."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from services.common.storage.data_dir import DataDir
from services.trainer.compute.data import ModelState
from services.trainer.execution.resident_models import Operation
from services.trainer.files import durable
from services.trainer.files.durable import DurableSnapshot
from services.trainer.files.volume import Volume
from tests.unit.trainer.execution.residing import MODEL, SEQ_ID, Trainer, until
from tests.unit.trainer.files.durable_snapshots import RESULT


@pytest.fixture
def trainer(tmp_path: Path, model_state: ModelState) -> Trainer:
    return Trainer(DataDir(tmp_path), model_state)


async def writing(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A snapshot of the model is being written, and is written when this is set."""
    begun, may_end, write = threading.Event(), threading.Event(), durable._write_files

    def slowly(target: Path, snapshot: DurableSnapshot, volume: Volume) -> None:
        begun.set()
        assert may_end.wait(60)
        write(target, snapshot, volume)

    monkeypatch.setattr(durable, "_write_files", slowly)
    trainer.residency.durable.changed(MODEL)
    await until(begun.is_set)
    return may_end


async def test_a_snapshot_becomes_durable_that_is_written_while_a_gateway_takes_the_lease_anew(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.stored(MODEL)
    await trainer.restore(MODEL, epoch=4)
    may_write = await writing(trainer, monkeypatch)
    async with asyncio.timeout(30):
        assert await trainer.restore(MODEL, epoch=6) == SEQ_ID, "it is here, and waits for no disk"
    may_write.set()
    assert await trainer.residency.durable.settle(MODEL)
    assert trainer.pointers.marked == [SEQ_ID]


async def test_a_gateway_that_takes_over_a_model_does_not_wait_for_what_it_exports(trainer: Trainer) -> None:
    trainer.stored(MODEL)
    await trainer.restore(MODEL, epoch=4)
    written = asyncio.get_running_loop().create_future()
    export = Operation(seq_id=2, units=None, model_id=MODEL, work=cast(Any, None), size=1, result=written)
    trainer.models[MODEL].sequence.unfinished[2] = export
    # A step after it: its snapshot is due once the export has its result.
    trainer.residency.durable.changed(MODEL)
    async with asyncio.timeout(30):
        assert await trainer.restore(MODEL, epoch=6) == SEQ_ID
    assert trainer.pointers.marked == []
    del trainer.models[MODEL].sequence.unfinished[2]
    written.set_result(RESULT)
    assert await trainer.residency.durable.settle(MODEL)
    assert trainer.pointers.marked == [SEQ_ID]


async def test_what_a_copy_from_before_a_move_still_writes_does_not_become_durable(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.stored(MODEL)
    await trainer.restore(MODEL, epoch=4)
    may_write = await writing(trainer, monkeypatch)
    restoring = asyncio.create_task(trainer.restore(MODEL, epoch=6, moved=6))
    await asyncio.sleep(0.05)
    may_write.set()
    assert await restoring == SEQ_ID
    assert trainer.pointers.marked == []
