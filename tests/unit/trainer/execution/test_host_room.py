"""Idle adapters go to the host before they go to the disk."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from services.common.contract.errors import Internal
from services.trainer.compute.data import LoraSpec
from services.trainer.compute.memory.failures import NoMemory
from services.trainer.execution import adapter_room, room
from services.trainer.execution.adapter_room import _HOST_IDLE_S, AdapterRoom
from services.trainer.execution.host_room import HostRoom, Way, way_out
from services.trainer.execution.resident_models import Model
from services.trainer.execution.room import IDLE_S, longest_idle

MIB = 2**20
NOW = 1000.0


def model(name: str, idle: float = IDLE_S, on_host: int = 0, held: bool = False, now: float = NOW) -> Model:
    return Model(
        name,
        created=True,
        lora=LoraSpec(10),
        adapter_bytes=10 * MIB,
        host_bytes=on_host,
        held=held,
        last_used=now - idle,
    )


def test_an_idle_adapter_goes_to_the_host_where_that_has_room() -> None:
    goes = model("a", _HOST_IDLE_S)
    assert way_out(goes, 6, 10, [goes, model("b", 99), model("c", 9, on_host=4)], NOW) is Way.HOST
    assert isinstance(way_out(goes, 7, 10, [goes, model("c", 9, on_host=4)], NOW), Model)


def test_of_a_full_host_what_was_used_least_lately_goes_to_the_disk() -> None:
    goes = model("a", 6)
    there = [model("b", 7, on_host=4), model("c", 9, on_host=4), model("d", 8, on_host=2)]
    found = way_out(goes, 4, 10, [goes, *there], NOW)
    assert isinstance(found, Model) and found.model_id == "c"


def test_the_one_that_leaves_goes_to_the_disk_itself_when_it_was_used_least_lately() -> None:
    goes = model("a", 20)
    assert way_out(goes, 4, 10, [goes, model("b", 7, on_host=10)], NOW) is Way.DISK


def test_one_that_is_larger_than_the_host_moves_no_other() -> None:
    goes = model("a", 6)
    assert way_out(goes, 11, 10, [goes, model("b", 99, on_host=10)], NOW) is Way.DISK


def test_what_is_wanted_back_is_not_sent_to_the_disk() -> None:
    goes = model("a", 6)
    assert way_out(goes, 4, 10, [goes, model("b", 99, on_host=10, held=True)], NOW) is Way.DISK


def test_nothing_goes_to_the_disk_that_was_used_just_now() -> None:
    goes = model("a", 1)
    assert way_out(goes, 11, 10, [goes], NOW) is Way.STAY
    assert way_out(goes, 4, 10, [goes, model("b", 2, on_host=10)], NOW) is Way.STAY


class Trainer:
    """A trainer with room for two adapters on its device and one on its host."""

    def __init__(self, *models: Model, host: int = 1) -> None:
        self.models = {made.model_id: made for made in models}
        self.done: list[str] = []
        self.refusals: list[bool] = []
        self.wanted = True
        self.host = HostRoom(self.models, host * 6 * MIB, lambda _: 6 * MIB, self.move, self.drop)
        self.room = AdapterRoom(
            self.models, 20 * MIB, lambda spec: spec.rank * MIB, self.host, self.save, self.drop
        )

    async def save(self, made: Model, wanted: Callable[[], bool]) -> bool:
        self.done.append(f"save {made.model_id}")
        return self.models.get(made.model_id) is made and not made.is_busy

    async def move(self, made: Model, to_host: bool) -> bool:
        if self.refusals and self.refusals.pop(0):
            self.done.append(f"{made.model_id} finds no memory")
            return False
        self.done.append(f"{made.model_id} {'leaves' if to_host else 'comes back'}")
        return True

    async def drop(self, made: Model) -> None:
        del self.models[made.model_id]
        self.done.append(f"drop {made.model_id}")

    async def make(self, name: str) -> None:
        async with self.room.room(name, LoraSpec(10)) as size:
            await asyncio.sleep(0)
            self.models[name] = Model(name, created=True, lora=LoraSpec(10), adapter_bytes=size)

    async def bring_back(self, name: str) -> None:
        self.models[name].held = True
        try:
            await self.room.bring_back(self.models[name], lambda: self.wanted)
            self.models[name].last_used = time.monotonic()
        finally:
            self.models[name].held = False


def idle(name: str, seconds: float, on_host: bool = False) -> Model:
    return model(name, seconds, 6 * MIB if on_host else 0, now=time.monotonic())


def refused_with(lacks: list[NoMemory]) -> Callable[[], Awaitable[str]]:
    """What is done once nothing of these is left."""

    async def attempt() -> str:
        if lacks:
            raise lacks.pop(0)
        return "done"

    return attempt


async def test_one_after_the_other_goes_to_the_host_and_from_there_to_the_disk() -> None:
    trainer = Trainer(idle("a", 30), idle("b", 20))
    await trainer.make("c")
    assert trainer.done == ["save a", "a leaves"]
    assert (trainer.room.used(), trainer.host.used()) == (20 * MIB, 6 * MIB)
    await trainer.make("d")
    assert trainer.done[2:] == ["save b", "drop a", "b leaves"]
    assert trainer.models["b"].host_bytes and not trainer.models["b"].held
    assert (trainer.room.used(), trainer.host.used()) == (20 * MIB, 6 * MIB)


async def test_one_that_comes_back_has_another_leave_for_it() -> None:
    trainer = Trainer(idle("a", 30, on_host=True), idle("b", 20), idle("c", 10), host=2)
    await trainer.bring_back("a")
    assert trainer.done == ["save b", "b leaves", "a comes back"]
    assert (trainer.room.used(), trainer.host.used()) == (20 * MIB, 6 * MIB)


async def test_on_a_device_without_memory_another_leaves_too() -> None:
    trainer = Trainer(idle("a", 30, on_host=True), idle("b", 20), host=2)
    trainer.refusals = [True]
    await trainer.bring_back("a")
    assert trainer.done == ["a finds no memory", "save b", "b leaves", "a comes back"]


async def test_one_that_cannot_leave_at_once_does_so_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_room, "_TRY_AGAIN_S", 0.0)
    trainer = Trainer(idle("a", 30, on_host=True), idle("b", 20), host=2)
    trainer.refusals = [True, True, True]
    save, tried = trainer.room._save, []

    async def at_the_third_time(made: Model, wanted: Callable[[], bool]) -> bool:
        # It has work meanwhile.
        tried.append(made.model_id)
        return len(tried) > 2 and await save(made, wanted)

    trainer.room._save = at_the_third_time
    await trainer.bring_back("a")
    assert trainer.done == [*["a finds no memory"] * 3, "save b", "b leaves", "a comes back"]


async def test_where_there_is_no_other_nobody_waits() -> None:
    trainer = Trainer(idle("a", 30, on_host=True))
    trainer.refusals = [True]
    with pytest.raises(Internal, match="comes back from the host, with no other there"):
        await trainer.bring_back("a")


async def test_when_no_other_can_leave_it_stays_on_the_host_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room, "_WAIT_S", 0.0)
    trainer = Trainer(idle("a", 30, on_host=True), idle("b", 0), host=2)
    trainer.refusals = [True]
    told = "out of device memory on an adapter of 10 MiB .* while the others, of 10 MiB, stayed"
    with pytest.raises(Internal, match=told) as caught:
        await trainer.bring_back("a")
    assert caught.value.code == "out_of_memory"
    assert trainer.models["a"].host_bytes and trainer.room.used() == 10 * MIB


async def test_what_finds_no_memory_on_the_device_has_idle_ones_leave_one_after_the_other() -> None:
    trainer = Trainer(idle("a", 30), idle("b", 20), model("mine", 0, held=True), host=2)
    lacks = [NoMemory("out of memory on the step"), NoMemory("out of memory on the step")]
    assert await trainer.room.with_memory(10 * MIB, refused_with(lacks)) == "done"
    assert trainer.done == ["save a", "a leaves", "save b", "b leaves"]


async def test_what_finds_no_memory_waits_for_others_to_be_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_room, "_TRY_AGAIN_S", 0.0)
    trainer = Trainer(model("busy", 0, held=True), model("mine", 0, held=True))
    lacks = [NoMemory("out of memory on the step")] * 3
    assert await trainer.room.with_memory(10 * MIB, refused_with(lacks)) == "done"
    assert trainer.done == []


async def test_what_finds_no_memory_where_no_other_leaves_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone, busy = (
        Trainer(model("mine", 0, held=True)),
        Trainer(model("busy", 0, held=True), model("mine", 0, held=True)),
    )
    told = "out of memory on the step, and no other adapter could leave .*; send it again later"
    for trainer, patient in ((alone, True), (busy, False)):
        with pytest.raises(NoMemory, match=told) as caught:
            lacks = [NoMemory("out of memory on the step")]
            await trainer.room.with_memory(10 * MIB, refused_with(lacks), patient=patient)
        assert caught.value.code == "out_of_memory"
    monkeypatch.setattr(room, "_WAIT_S", 0.0)
    with pytest.raises(NoMemory, match=told):
        await busy.room.with_memory(10 * MIB, refused_with([NoMemory("out of memory on the step")]))


async def test_a_host_without_memory_sends_an_adapter_to_the_disk() -> None:
    trainer = Trainer(idle("a", 30), idle("b", 20))
    trainer.refusals = [True]
    await trainer.make("c")
    assert trainer.done == ["save a", "a finds no memory", "drop a"]
    assert trainer.host.used() == 0


@pytest.mark.parametrize("refused", [False, True])
async def test_one_that_is_wanted_while_it_leaves_comes_back_at_once(refused: bool) -> None:
    trainer = Trainer(idle("a", 30), idle("b", 20), host=2)
    leaving, may_leave, move = asyncio.Event(), asyncio.Event(), trainer.host._move
    order = asyncio.Lock()

    async def slowly(made: Model, to_host: bool) -> bool:
        # Ranks do one command after the other.
        async with order:
            if to_host and made.model_id == "a":
                leaving.set()
                await may_leave.wait()
                trainer.done.append("a is asked to leave")
                return not refused
            return await move(made, to_host)

    trainer.host._move = slowly
    making = asyncio.create_task(trainer.make("c"))
    await leaving.wait()
    a = trainer.models["a"]
    assert a.host_bytes and not a.held, "nothing keeps its next operation from having it back"
    back = asyncio.create_task(trainer.bring_back("a"))
    await asyncio.sleep(0)
    may_leave.set()
    await asyncio.gather(making, back)
    assert "drop a" not in trainer.done and trainer.models["a"] is a
    assert a.host_bytes == 0 and trainer.models["b"].host_bytes
    assert (trainer.room.used(), trainer.host.used()) == (20 * MIB, 6 * MIB)


async def test_one_that_makes_room_for_two_at_once_leaves_once() -> None:
    trainer = Trainer(idle("a", 30), idle("b", 20), host=2)
    save = trainer.room._save

    async def slowly(made: Model, wanted: Callable[[], bool]) -> bool:
        await asyncio.sleep(0.01)
        return await save(made, wanted)

    trainer.room._save = slowly
    await asyncio.gather(trainer.make("c"), trainer.make("d"))
    assert trainer.done.count("a leaves") == trainer.done.count("b leaves") == 1
    assert not any(done.startswith("drop") for done in trainer.done)
    assert (trainer.room.used(), trainer.host.used()) == (20 * MIB, 12 * MIB)


async def test_two_that_leave_at_once_do_not_take_the_hosts_room_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room, "_WAIT_S", 0.0)
    trainer = Trainer(idle("a", 30), idle("b", 20))
    await asyncio.gather(trainer.make("c"), trainer.make("d"))
    assert trainer.host.used() == 6 * MIB
    assert sorted(trainer.models) in (["a", "c", "d"], ["b", "c", "d"])


async def test_one_that_another_waiter_sent_to_the_host_meanwhile_neither_goes_again_nor_to_the_disk() -> (
    None
):
    trainer = Trainer(idle("x", 40, on_host=True), idle("a", 30))
    drop, move = trainer.host._drop, trainer.host._move
    dropping, may_go = asyncio.Event(), asyncio.Event()

    async def slow_drop(made: Model) -> None:
        # It is gone at once, and the ranks are told.
        await drop(made)
        dropping.set()
        await may_go.wait()

    async def slow_move(made: Model, to_host: bool) -> bool:
        await asyncio.sleep(0.01)
        return await move(made, to_host)

    trainer.host._drop, trainer.host._move = slow_drop, slow_move
    a = trainer.models["a"]
    first = asyncio.create_task(trainer.room._leave(a, lambda: True))
    await dropping.wait()
    second = asyncio.create_task(trainer.room._leave(a, lambda: True))
    while not a.host_bytes:  # noqa: ASYNC110
        await asyncio.sleep(0)
    may_go.set()
    assert await asyncio.gather(first, second) == [True, True]
    assert trainer.done == ["save a", "drop x", "save a", "a leaves"]
    assert a.host_bytes == 6 * MIB and trainer.models["a"] is a


async def test_the_room_of_one_that_leaves_is_free_only_once_it_has_left() -> None:
    trainer = Trainer(idle("a", 30), idle("b", 20), host=2)
    leaving, may_leave, move = asyncio.Event(), asyncio.Event(), trainer.host._move

    async def slowly(made: Model, to_host: bool) -> bool:
        leaving.set()
        await may_leave.wait()
        return await move(made, to_host)

    trainer.host._move = slowly
    making = asyncio.create_task(trainer.make("c"))
    await leaving.wait()
    await asyncio.sleep(0.01)
    assert "c" not in trainer.models and trainer.room.used() == 20 * MIB
    assert longest_idle(trainer.models.values(), time.monotonic()) is trainer.models["b"]
    may_leave.set()
    await making
    assert (trainer.room.used(), trainer.host.used()) == (20 * MIB, 6 * MIB)
    assert trainer.done == ["save a", "a leaves"]


@pytest.mark.parametrize("refused", [False, True])
async def test_one_that_is_not_wanted_any_more_waits_for_no_room_and_pushes_none_out(refused: bool) -> None:
    others = [idle("b", 0), idle("c", 0)][: 1 if refused else 2]
    trainer = Trainer(idle("a", 30, on_host=True), *others, host=2)
    trainer.refusals = [True] if refused else []
    back = asyncio.create_task(trainer.bring_back("a"))
    await asyncio.sleep(0.01)
    trainer.wanted = False
    for other in others:
        other.last_used -= 60
    async with asyncio.timeout(5):
        await back
    assert trainer.done == (["a finds no memory"] if refused else [])
    assert trainer.room.used() == 10 * MIB * len(others) and trainer.models["a"].host_bytes


async def test_one_whose_leave_was_refused_asks_for_no_room_again() -> None:
    trainer = Trainer(idle("a", 30), idle("b", 0))
    may_leave = asyncio.Event()

    async def refused(made: Model, to_host: bool) -> bool:
        await may_leave.wait()
        return False

    trainer.host._move = refused
    a = trainer.models["a"]
    leaving = asyncio.create_task(trainer.room._leave(a, lambda: True))
    while not a.leaving:  # noqa: ASYNC110
        await asyncio.sleep(0)
    back = asyncio.create_task(trainer.bring_back("a"))
    await asyncio.sleep(0)
    may_leave.set()
    assert not await leaving
    async with asyncio.timeout(5):
        await back
    assert trainer.room.used() == 20 * MIB and trainer.done == ["save a"]


async def test_two_small_ones_do_not_take_in_turn_what_a_large_one_waits_for() -> None:
    trainer = Trainer(idle("a", 30), idle("b", 0))
    order = []

    async def make(name: str, mib: int) -> None:
        async with trainer.room.room(name, LoraSpec(mib)):
            order.append(name)

    large = asyncio.create_task(make("large", 20))
    while trainer.room.used() > 10 * MIB:  # noqa: ASYNC110
        await asyncio.sleep(0)
    small = asyncio.create_task(make("small", 10))
    await asyncio.sleep(0.3)
    assert order == [], "what is free was made for the large one"
    del trainer.models["b"]
    async with asyncio.timeout(5):
        await asyncio.gather(large, small)
    assert order == ["large", "small"]
