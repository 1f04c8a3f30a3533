"""Who runs next when not all can."""

from __future__ import annotations

import asyncio
import random

from services.gateway.access.fair_slots import FairSlots


class Runs:
    """Requests that run until they are told to end."""

    def __init__(self, slots: FairSlots) -> None:
        self.slots = slots
        self.started: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def want(self, owner: str, name: str, slots: int = 1, priority: int = 0) -> None:
        self.ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._run(owner, name, slots, priority))
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def _run(self, owner: str, name: str, slots: int, priority: int) -> None:
        async with self.slots.held(owner, slots, priority):
            self.started.append(name)
            await self.ends[name].wait()

    async def end(self, name: str) -> None:
        self.ends[name].set()
        async with asyncio.timeout(60):
            await self.tasks[name]
        await asyncio.sleep(0)


async def test_a_key_with_one_request_goes_before_the_many_of_another() -> None:
    runs = Runs(FairSlots(2))
    for number in range(5):
        await runs.want("ann", f"a{number}")
    await runs.want("bob", "b0")
    assert runs.started == ["a0", "a1"]
    await runs.end("a0")
    assert runs.started[2:] == ["b0"]
    await runs.end("b0")
    assert runs.started[3:] == ["a2"]


async def test_keys_take_turns_and_each_key_is_served_in_order() -> None:
    runs = Runs(FairSlots(1))
    for number in range(2):
        for owner in ("ann", "bob"):
            await runs.want(owner, f"{owner}{number}")
    for name in ("ann0", "bob0", "ann1"):
        await runs.end(name)
    assert runs.started == ["ann0", "bob0", "ann1", "bob1"]


async def test_a_large_request_waits_for_a_slot_and_is_not_overtaken() -> None:
    runs = Runs(FairSlots(2))
    await runs.want("ann", "small", 1)
    await runs.want("ann", "other", 1)
    await runs.want("ann", "large", 9)
    await runs.want("ann", "tiny", 1)
    assert runs.started == ["small", "other"]
    await runs.end("small")
    assert runs.started == ["small", "other", "large"]
    await runs.end("other")
    assert runs.started == ["small", "other", "large"], "what is dealt beyond all slots counts"
    await runs.end("large")
    assert runs.started == ["small", "other", "large", "tiny"]


async def test_no_slot_lies_idle_because_the_next_request_takes_more() -> None:
    runs = Runs(FairSlots(4))
    for name in ("first", "second", "third"):
        await runs.want("ann", name, 3)
    assert runs.started == ["first", "second"]
    await runs.end("first")
    assert runs.started == ["first", "second", "third"]


async def test_whoever_is_cancelled_takes_no_slot() -> None:
    runs = Runs(FairSlots(1))
    for number in range(3):
        await runs.want("ann", f"a{number}")
    runs.tasks["a1"].cancel()
    await asyncio.sleep(0)
    await runs.end("a0")
    assert runs.started == ["a0", "a2"]
    runs.tasks["a2"].cancel()
    await asyncio.sleep(0)
    await runs.want("bob", "b0")
    assert runs.started == ["a0", "a2", "b0"]


async def test_more_replicas_let_more_run_at_once() -> None:
    slots = FairSlots(1)
    runs = Runs(slots)
    for number in range(4):
        await runs.want("ann", f"a{number}")
    slots.resize(3)
    await asyncio.sleep(0)
    assert runs.started == ["a0", "a1", "a2"]
    slots.resize(1)
    await runs.end("a0")
    assert runs.started == ["a0", "a1", "a2"]


async def test_of_one_key_the_highest_priority_goes_first_and_among_equals_the_oldest() -> None:
    runs = Runs(FairSlots(1))
    await runs.want("ann", "running", priority=-100)
    for name, priority in (("low", -1), ("first", 0), ("high", 7), ("second", 0), ("also high", 7)):
        await runs.want("ann", name, priority=priority)
    assert runs.started == ["running"], "what runs goes on"
    for name in ("running", "high", "also high", "first", "second"):
        await runs.end(name)
    assert runs.started == ["running", "high", "also high", "first", "second", "low"]


async def test_no_priority_takes_a_turn_from_another_key() -> None:
    for anns, bobs in ((0, 0), (100, -100), (-100, 100)):
        runs = Runs(FairSlots(1))
        for name in ("ann0", "ann1", "bob0", "ann2", "bob1"):
            owner = name[:3]
            await runs.want(owner, name, priority=anns if owner == "ann" else bobs)
        for name in ("ann0", "ann1", "bob0", "ann2"):
            await runs.end(name)
        assert runs.started == ["ann0", "ann1", "bob0", "ann2", "bob1"]


async def test_those_that_were_cancelled_behind_others_are_not_kept() -> None:
    slots = FairSlots(1)
    runs = Runs(slots)
    await runs.want("ann", "running")
    await runs.want("ann", "next", priority=1)
    for number in range(200):
        await runs.want("ann", f"low{number}", priority=-1)
        runs.tasks[f"low{number}"].cancel()
        await asyncio.sleep(0)
    assert len(slots._waiting["ann"]) < 10
    await runs.want("ann", "low", priority=-1)
    for name in ("running", "next"):
        await runs.end(name)
    assert runs.started == ["running", "next", "low"]


async def test_those_that_stay_when_others_are_cancelled_keep_their_order() -> None:
    slots = FairSlots(1)
    runs = Runs(slots)
    await runs.want("ann", "running")
    priorities = random.Random(1).sample(range(1000), 60)
    for number in priorities:
        await runs.want("ann", str(number), priority=number)
    for number in priorities[::2] + priorities[1:40:2]:
        runs.tasks[str(number)].cancel()
    await runs.want("ann", "-1", priority=-1)
    left = [str(number) for number in sorted(priorities[41::2], reverse=True)] + ["-1"]
    for name in ("running", *left):
        await runs.end(name)
    assert runs.started == ["running", *left]


async def test_of_keys_that_hold_nothing_nothing_is_kept() -> None:
    slots = FairSlots(2)
    for owner in ("ann", "bob", "eve"):
        async with slots.held(owner, 3):
            pass
    assert (slots._used_by, slots._waiting) == ({}, {})
