"""Copies of models that leave the trainer take no more of the host than there is for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.common.contract.errors import Overloaded
from services.trainer.files import copy_room
from services.trainer.files.copy_room import Way, let_in


@pytest.mark.parametrize(
    ("waiting", "used", "admitted"),
    [
        ([4, 4, 4], 0, 2),
        ([4, 4], 6, 1),
        ([20, 1], 0, 1),
        ([20, 1], 1, 0),
        ([8, 1], 4, 0),
        ([], 4, 0),
    ],
    ids=[
        "as many as fit",
        "beside others",
        "a large one alone",
        "not beside any",
        "none passes the first",
        "",
    ],
)
def test_who_waits_is_let_in_from_the_first_one_on(waiting: list[int], used: int, admitted: int) -> None:
    assert let_in(waiting, used, 10) == admitted


class Copying:
    """Copies that are taken, and leave when a test says so."""

    def __init__(self, way: Way) -> None:
        self._way = way
        self.taken: list[str] = []
        self._leaves: dict[str, asyncio.Event] = {}

    async def copy(self, name: str, nbytes: int) -> bool:
        """Whether it had to wait."""
        self._leaves[name] = asyncio.Event()
        async with self._way.hold(nbytes) as waited:
            self.taken.append(name)
            await self._leaves[name].wait()
        return waited

    async def leaves(self, name: str) -> None:
        self._leaves[name].set()
        for _ in range(10):
            await asyncio.sleep(0)


@asynccontextmanager
async def copying(*sizes: tuple[str, int]) -> AsyncIterator[tuple[Copying, dict[str, asyncio.Task[bool]]]]:
    """Copies that begin one after the other, where 10 bytes are for all."""
    all_of_them = Copying(Way(10, "a copy of the model"))
    tasks = {name: asyncio.create_task(all_of_them.copy(name, nbytes)) for name, nbytes in sizes}
    await asyncio.sleep(0)
    yield all_of_them, tasks
    for task in tasks.values():
        task.cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert all_of_them._way.used == 0, "room was lost, or given back twice"


async def test_small_copies_do_not_pass_a_large_one_that_came_before_them() -> None:
    async with copying(("first", 6), ("large", 20), ("small", 1)) as (found, tasks):
        assert found.taken == ["first"]
        await found.leaves("first")
        assert found.taken == ["first", "large"], "it goes alone"
        await found.leaves("large")
        assert found.taken == ["first", "large", "small"]
        await found.leaves("small")
        waited = [await tasks[name] for name in ("first", "large", "small")]
        assert waited == [False, True, True]


async def test_who_is_cancelled_while_it_waits_lets_the_next_one_in() -> None:
    async with copying(("first", 6), ("large", 20), ("small", 1)) as (found, tasks):
        tasks["large"].cancel()
        await asyncio.gather(tasks["large"], return_exceptions=True)
        await asyncio.sleep(0)
        assert found.taken == ["first", "small"]


async def test_who_is_cancelled_just_when_it_gets_room_gives_it_back() -> None:
    async with copying(("first", 10), ("second", 10), ("third", 10)) as (found, tasks):
        found._leaves["first"].set()
        await asyncio.sleep(0)
        assert found._way.used == 10 and found.taken == ["first"], "the room is the second one's"
        tasks["second"].cancel()
        await asyncio.gather(tasks["second"], return_exceptions=True)
        await asyncio.sleep(0)
        assert found.taken == ["first", "third"]


async def test_who_waits_in_vain_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_room, "WAIT_S", 0.01)
    async with copying(("first", 6), ("second", 6)) as (found, tasks):
        with pytest.raises(Overloaded, match="send the request again later"):
            await tasks["second"]
        assert found._way.used == 6


async def test_a_timeout_of_what_is_done_with_a_copy_is_its_own() -> None:
    way = Way(10, "a copy of the model")
    with pytest.raises(TimeoutError, match="of its own"):
        async with way.hold(1):
            raise TimeoutError("of its own")
    assert way.used == 0


async def test_what_takes_no_room_waits_for_none() -> None:
    async with copying(("first", 20), ("second", 1), ("nothing", 0)) as (found, tasks):
        assert found.taken == ["first", "nothing"]
        await found.leaves("nothing")
        assert await tasks["nothing"] is False
