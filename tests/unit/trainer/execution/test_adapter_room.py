"""Adapters are let in by the memory that they take."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from services.common.contract.errors import InvalidRequest, Overloaded
from services.trainer.compute.data import LoraSpec
from services.trainer.execution import room
from services.trainer.execution.adapter_room import AdapterRoom
from services.trainer.execution.host_room import HostRoom
from services.trainer.execution.resident_models import Model
from services.trainer.execution.room import IDLE_S

MIB = 2**20
LONG_AGO = time.monotonic() - IDLE_S - 1


def adapter(name: str, mib: int, used: float = LONG_AGO) -> Model:
    return Model(name, created=True, lora=LoraSpec(mib), adapter_bytes=mib * MIB, last_used=used)


def bytes_of(spec: LoraSpec) -> int:
    return spec.rank * MIB


class Trainer:
    """A trainer with room for 100 MiB, of which rank r takes r MiB."""

    def __init__(self, *models: Model) -> None:
        self.models = {made.model_id: made for made in models}
        self.done: list[str] = []
        self.host = HostRoom(self.models, 0, bytes_of, self.move, self.drop)
        self.room = AdapterRoom(self.models, 100 * MIB, bytes_of, self.host, self.save, self.drop)

    async def save(self, made: Model, wanted: Callable[[], bool]) -> bool:
        self.done.append(f"save {made.model_id}")
        return True

    async def move(self, made: Model, to_host: bool) -> bool:
        raise AssertionError("there is no host to move to")

    async def drop(self, made: Model) -> None:
        del self.models[made.model_id]
        self.done.append(f"drop {made.model_id}")

    async def make(self, name: str, mib: int) -> None:
        async with self.room.room(name, LoraSpec(mib)) as size:
            await asyncio.sleep(0.01)
            self.models[name] = adapter(name, size // MIB)


async def test_an_adapter_that_fits_comes_beside_the_others() -> None:
    trainer = Trainer(adapter("a", 60))
    await trainer.make("b", 40)
    assert list(trainer.models) == ["a", "b"]
    assert trainer.room.used() == 100 * MIB
    assert trainer.done == []


async def test_those_that_are_idle_longest_are_saved_and_make_room() -> None:
    trainer = Trainer(adapter("a", 50, LONG_AGO - 1), adapter("b", 30, LONG_AGO - 2), adapter("c", 20))
    await trainer.make("d", 60)
    assert trainer.done == ["save b", "drop b", "save a", "drop a"]
    assert list(trainer.models) == ["c", "d"]


async def test_an_adapter_that_never_fits_is_refused_with_both_numbers() -> None:
    trainer = Trainer(adapter("a", 60))
    with pytest.raises(InvalidRequest, match=r"takes 101 MiB .* has 100 MiB for adapters"):
        await trainer.make("b", 101)
    assert trainer.done == []


async def test_one_that_was_here_before_comes_back_even_so() -> None:
    trainer = Trainer(adapter("a", 60))
    async with trainer.room.room("b", LoraSpec(101), had_before=True) as size:
        assert size == 100 * MIB
    assert trainer.done == ["save a", "drop a"]


async def test_while_all_are_in_use_one_waits_and_is_told_what_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room, "_WAIT_S", 0.0)
    trainer = Trainer(adapter("a", 60, time.monotonic() + 60))
    with pytest.raises(Overloaded, match=r"takes 50 MiB, and of the 100 MiB .* 60 MiB are in use"):
        await trainer.make("b", 50)
    assert trainer.room.used() == 60 * MIB


async def test_what_is_being_made_counts_before_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_WAIT_S", 0.0)
    trainer = Trainer()
    found = await asyncio.gather(*(trainer.make(name, 60) for name in "ab"), return_exceptions=True)
    assert [type(each) for each in found] == [type(None), Overloaded]
    assert trainer.room.used() == 60 * MIB


async def test_a_model_that_gets_work_while_it_is_saved_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_WAIT_S", 0.0)
    trainer = Trainer(adapter("a", 60))

    async def save(made: Model, wanted: Callable[[], bool]) -> bool:
        made.held = True
        return False

    trainer.room = AdapterRoom(trainer.models, 100 * MIB, bytes_of, trainer.host, save, trainer.drop)
    with pytest.raises(Overloaded):
        await trainer.make("b", 60)
    assert list(trainer.models) == ["a"]
