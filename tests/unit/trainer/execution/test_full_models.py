"""Which models that train all weights stay on the trainer, and when they are made durable."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from services.common.contract.errors import Overloaded
from services.trainer.compute.data import LoraSpec
from services.trainer.execution import room
from services.trainer.execution.full_models import SNAPSHOT_BYTES, FullModels, snapshot_due
from services.trainer.execution.resident_models import Model
from services.trainer.execution.room import IDLE_S, longest_idle

LORA = LoraSpec(4)


def model(name: str, used: float = 0.0, lora: LoraSpec | None = None, **state: object) -> Model:
    made = Model(name, created=True, lora=lora, last_used=used)
    for key, value in state.items():
        setattr(made, key, value)
    return made


def test_a_full_model_is_made_durable_every_so_many_steps() -> None:
    due = [snapshot_due(model("m", unsaved_steps=steps), every=3) for steps in (1, 2, 3, 4)]
    assert due == [False, False, True, True]


def test_a_full_model_is_made_durable_before_its_journal_grows_large() -> None:
    assert not snapshot_due(model("m", unsaved_steps=1, unsaved_bytes=SNAPSHOT_BYTES - 1), every=10)
    assert snapshot_due(model("m", unsaved_steps=1, unsaved_bytes=SNAPSHOT_BYTES), every=10)


def test_an_adapter_is_made_durable_after_every_step() -> None:
    assert snapshot_due(model("m", lora=LORA, unsaved_steps=1), every=10)


def test_the_model_that_was_idle_longest_is_parked() -> None:
    found = longest_idle([model("b", used=2.0), model("a", used=1.0)], now=100.0)
    assert found is not None and found.model_id == "a"


@pytest.mark.parametrize("state", [{"held": True}, {"publishing": True}, {"created": False}])
def test_a_model_that_has_work_is_not_parked(state: dict[str, bool]) -> None:
    assert longest_idle([model("a", **state)], now=100.0) is None


def test_a_model_used_just_now_is_not_parked() -> None:
    assert longest_idle([model("a", used=100.0)], now=100.0 + IDLE_S / 2) is None


class Trainer:
    """What parks models, and notes in which order it did what."""

    def __init__(self, *models: Model, most: int = 1) -> None:
        self.models = {made.model_id: made for made in models}
        self.done: list[str] = []
        self.full = FullModels(self.models, most, self.park)

    async def park(self, made: Model, wanted: Callable[[], bool]) -> bool:
        del self.models[made.model_id]
        self.done.append(f"park {made.model_id}")
        return True


async def test_an_idle_model_is_parked_to_make_room() -> None:
    trainer = Trainer(model("a", used=time.monotonic() - IDLE_S - 1))
    async with trainer.full.room("new"):
        assert trainer.done == ["park a"]


async def test_an_adapter_makes_no_room_for_a_full_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_WAIT_S", 0.0)
    long_ago = time.monotonic() - IDLE_S - 1
    trainer = Trainer(model("a"), model("adapter", used=long_ago, lora=LORA))
    trainer.models["a"].held = True
    with pytest.raises(Overloaded):
        async with trainer.full.room("new"):
            pass
    assert trainer.done == []


async def test_nothing_is_parked_while_there_is_room() -> None:
    trainer = Trainer(model("a"), model("adapter", lora=LORA), most=2)
    async with trainer.full.room("new"):
        assert trainer.done == []


async def test_a_model_that_gets_work_while_it_is_parked_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_WAIT_S", 0.0)
    trainer = Trainer(model("a", used=time.monotonic() - IDLE_S - 1))

    async def park(made: Model, wanted: Callable[[], bool]) -> bool:
        made.held = True
        return False

    trainer.full = FullModels(trainer.models, 1, park)
    with pytest.raises(Overloaded, match="--max-full-models"):
        async with trainer.full.room("new"):
            pass
    assert "a" in trainer.models


async def test_models_wait_for_room_one_after_the_other() -> None:
    trainer = Trainer()

    async def make(name: str) -> None:
        async with trainer.full.room(name):
            await asyncio.sleep(0.01)
            trainer.models[name] = model(name, used=time.monotonic() - IDLE_S - 1)

    await asyncio.gather(make("a"), make("b"))
    assert list(trainer.models) == ["b"]
    assert trainer.done == ["park a"]
