"""In which order those get room that wait for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from services.common.contract.errors import Overloaded
from services.trainer.compute.data import LoraSpec
from services.trainer.execution import room
from services.trainer.execution.resident_models import Model
from services.trainer.execution.room import IDLE_S, Room, beside, longest_idle

MOST = 100
_LONG = 0.05
"""Seconds in which everybody who waits has looked several times."""


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_LOOK_AGAIN_S", 0.005)
    monkeypatch.setattr(room, "_SEEN_S", 0.0)


class Waiters:
    """Room for 100, of which models that are in use have some."""

    def __init__(self, **in_use: int) -> None:
        self.models = {name: self._in_use(name, size) for name, size in in_use.items()}
        self.room = Room(self.models, MOST, lambda model: model.adapter_bytes, self._leave)
        self.came: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []

    def _in_use(self, name: str, size: int) -> Model:
        return Model(name, created=True, lora=LoraSpec(1), adapter_bytes=size, held=True)

    async def _leave(self, model: Model, wanted: Callable[[], bool]) -> bool:
        del self.models[model.model_id]
        return True

    async def ask(self, name: str, size: int) -> asyncio.Task[None]:
        """One more comes, and waits if it has to."""

        async def make() -> None:
            async with self.room.hold(name, size, lambda: Overloaded("all are in use")):
                self.came.append(name)
                self.models[name] = self._in_use(name, size)

        task = asyncio.create_task(make())
        self._tasks.append(task)
        await asyncio.sleep(_LONG)
        return task

    async def ask_impatiently(self, name: str, size: int) -> asyncio.Task[None]:
        """One more comes, and will have waited in vain soon."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(room, "_WAIT_S", 2 * _LONG)
            return await self.ask(name, size)

    async def unload(self, name: str) -> None:
        """A client is done with one, which leaves for nobody."""
        del self.models[name]
        await asyncio.sleep(_LONG)

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def waiters(**in_use: int) -> AsyncIterator[Waiters]:
    made = Waiters(**in_use)
    async with asyncio.timeout(30):
        yield made
        await made.end()


def test_others_have_what_the_first_found_free_and_once_it_fits_what_it_does_not_need() -> None:
    assert beside(30, first=60, spare=20) == 20
    assert beside(10, first=60, spare=20) == 10
    assert beside(60, first=60, spare=20) == 0
    assert beside(100, first=60, spare=20) == 40


def test_the_model_that_is_idle_longest_leaves_and_none_that_is_made_used_or_leaves_already() -> None:
    older, newer = (Model(name, created=True, last_used=at) for name, at in (("a", 50.0), ("b", 60.0)))
    others = [
        Model("made", last_used=0.0),
        Model("leaves", created=True, leaving=True, last_used=0.0),
        Model("used", created=True, held=True, last_used=0.0),
        Model("lately", created=True, last_used=100.0),
    ]
    now = 100.0 + IDLE_S - 0.1
    assert longest_idle([*others, newer, older], now) is older
    assert longest_idle(others, now) is None


async def test_small_ones_do_not_take_for_ever_what_frees_itself_while_a_large_one_waits() -> None:
    async with waiters(a=30, b=30, c=40) as found:
        await found.ask("large", 90)
        for name in ("a", "b"):
            await found.ask(f"small after {name}", 30)
            await found.unload(name)
        assert found.came == []
        await found.unload("c")
        assert found.came == ["large"]
        await found.unload("large")
        assert sorted(found.came) == ["large", "small after a", "small after b"]


async def test_what_a_large_one_found_free_and_could_not_use_others_may_take_once() -> None:
    async with waiters(a=50, b=30) as found:
        await found.ask("large", 60)
        await found.ask("small", 20)
        assert found.came == ["small"], "the large one loses nothing: it waits for others to leave"
        await found.unload("small")
        await found.ask("too", 20)
        assert found.came == ["small"]
        await found.unload("a")
        assert found.came == ["small", "large"]


async def test_room_for_the_first_is_its_own_before_it_has_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    async with waiters(a=50, b=30) as found:
        monkeypatch.setattr(room, "_LOOK_AGAIN_S", 60.0)
        await found.ask("large", 60)
        await found.unload("a")
        # 70 are free, of which 20 were so before.
        await found.ask("small", 20)
        assert found.came == []
        await found.ask("smaller", 10)
        assert found.came == ["smaller", "large"]


async def test_after_one_has_waited_in_vain_its_room_is_anybodys() -> None:
    async with waiters(a=50, b=50) as found:
        large = await found.ask_impatiently("large", 80)
        await found.ask("small", 20)
        await found.unload("a")
        with pytest.raises(Overloaded):
            await large
        await asyncio.sleep(_LONG)
        assert found.came == ["small"]


async def test_one_that_has_waited_in_vain_and_asks_again_waits_where_it_did() -> None:
    async with waiters(a=50, b=50) as found:
        large = await found.ask_impatiently("large", 80)
        await found.ask("later", 80)
        with pytest.raises(Overloaded):
            await large
        await found.ask("large", 80)
        await found.unload("a")
        await found.unload("b")
        assert found.came == ["large"]
        await found.unload("large")
        assert found.came == ["large", "later"]
        await found.ask("large", 80)
        await found.ask("last", 80)
        await found.unload("later")
        assert found.came[2:] == ["large"], "what it waited for is had, and it waits as one that comes anew"


async def test_one_that_takes_its_former_place_leaves_others_no_more_than_they_had() -> None:
    async with waiters(a=50, b=50) as found:
        large = await found.ask_impatiently("large", 90)
        await found.ask("later", 80)
        with pytest.raises(Overloaded):
            await large
        await asyncio.sleep(_LONG)
        await found.unload("a")
        await found.ask("large", 90)
        await found.ask("small", 20)
        assert found.came == [], "50 are free, and the one that was first meanwhile has waited for them"


@pytest.mark.parametrize(("bound", "most"), [("_REMEMBERED", 1), ("_REMEMBERED_S", 0.0)])
async def test_where_one_waited_is_remembered_of_few_and_for_a_while(
    monkeypatch: pytest.MonkeyPatch, bound: str, most: float
) -> None:
    monkeypatch.setattr(room, bound, most)
    async with waiters(a=100) as found:
        monkeypatch.setattr(room, "_WAIT_S", 0.0)
        for name in ("large", "other"):
            with pytest.raises(Overloaded):
                await (await found.ask(name, 80))
        assert len(found.room._since) <= 2
        monkeypatch.setattr(room, "_WAIT_S", 60.0)
        await found.ask("later", 80)
        await found.ask("large", 80)
        await found.unload("a")
        assert found.came == ["later"]


async def test_idle_ones_leave_for_the_first_and_for_nobody_else() -> None:
    async with waiters(a=50, b=40) as found:
        await found.ask("large", 70)
        await found.ask("small", 20)
        idle = found.models["a"]
        idle.held, idle.last_used = False, time.monotonic() - room.IDLE_S
        await asyncio.sleep(_LONG)
        assert found.came == [] and "a" not in found.models, "60 are free, and 10 of them anybody's"
        await found.unload("b")
        assert sorted(found.came) == ["large", "small"]


async def test_a_thousand_that_wait_look_at_a_thousand_models_a_few_times_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room, "_SEEN_S", 0.5)
    models = {name: Model(name, created=True, lora=LoraSpec(1), held=True) for name in map(str, range(100))}
    looked = 0

    def taken(model: Model) -> int:
        nonlocal looked
        looked += 1
        return 1

    async def leave(model: Model, wanted: Callable[[], bool]) -> bool:
        return False

    full = Room(models, 100, taken, leave)

    async def wait(name: str) -> None:
        async with full.hold(name, 1, lambda: Overloaded("all are in use")):
            pass

    waiting = [asyncio.create_task(wait(f"waits {number}")) for number in range(100)]
    # Each looks again some eighty times meanwhile.
    await asyncio.sleep(0.4)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert looked < 100 * 100 * 4
