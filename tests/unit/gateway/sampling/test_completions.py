"""Polls for completions: which of them look in Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from services.common.contract import ids
from services.gateway.records.sample_journal import Completion
from services.gateway.sampling import completions
from services.gateway.sampling.completions import Completions, Target

TARGET = Target(ids.sampling_session_id("s", 0), 0)


def resolved(number: int) -> Completion:
    request_id = ids.request_id(TARGET.sampling_session_id, number)
    return Completion(request_id, "finished", 5, cursor=number)


class Journal:
    """Has what `resolve` puts there, and says so as Redis does."""

    def __init__(self) -> None:
        self.kept: list[Completion] = []
        self.looks = 0
        self.most = completions.MOST_COMPLETIONS
        self.on_look: Callable[[], None] = lambda: None
        self.tell: Callable[[str], None]
        self.gap: Callable[[], None]
        self.draining = False

    def listen(self, on_resolved: Callable[[str], None], on_gap: Callable[[], None]) -> None:
        self.tell, self.gap = on_resolved, on_gap

    def resolve(self, number: int) -> None:
        self.kept.append(resolved(number))
        self.tell(resolved(number).request_id)

    async def completions(
        self, session: str, clone: int, cursor: int, forgets: bool
    ) -> tuple[list[Completion], int]:
        self.looks += 1
        found = [one for one in self.kept if one.cursor > cursor][: self.most]
        self.on_look()
        await asyncio.sleep(0)
        return found, found[-1].cursor if found else cursor


@pytest.fixture
def journal() -> Journal:
    return Journal()


@pytest.fixture
def polls(journal: Journal) -> Completions:
    of: Any = journal
    return Completions(of, of, of)


async def told(polls: Completions, cursor: int, seconds: float = 0.01) -> list[int]:
    return [one.cursor for one in (await polls.wait(TARGET, cursor, seconds)).completions]


async def test_who_was_told_all_looks_again_when_something_is_resolved(
    polls: Completions, journal: Journal
) -> None:
    assert await told(polls, 0) == []
    journal.resolve(1)
    assert await told(polls, 0) == [1]
    assert [await told(polls, 1) for _ in range(3)] == [[], [], []]
    assert journal.looks == 2
    journal.resolve(2)
    assert await told(polls, 1) == [2]
    waiting = asyncio.create_task(told(polls, 2, seconds=30))
    await asyncio.sleep(0.01)
    journal.resolve(3)
    assert await waiting == [3]
    assert journal.looks == 4


async def test_a_poll_from_another_cursor_looks(polls: Completions, journal: Journal) -> None:
    journal.resolve(1)
    assert await told(polls, 0) == [1]
    assert await told(polls, 0) == [1], "its answer was lost on the way"
    assert journal.looks == 2


async def test_who_was_told_all_looks_after_what_may_have_been_missed(
    polls: Completions, journal: Journal
) -> None:
    await told(polls, 0)
    journal.kept.append(resolved(1))
    journal.gap()
    assert await told(polls, 0) == [1]
    journal.kept.append(resolved(2))
    waiting = asyncio.create_task(told(polls, 1, seconds=30))
    await asyncio.sleep(0.01)
    journal.gap()
    assert await waiting == [2]


async def test_what_is_resolved_during_a_look_is_told_by_the_next_poll(
    polls: Completions, journal: Journal
) -> None:
    journal.resolve(1)

    def another() -> None:
        # Redis had answered before it.
        journal.on_look = lambda: None
        journal.resolve(2)

    journal.on_look = another
    assert await told(polls, 0) == [1]
    assert await told(polls, 1) == [2]


async def test_a_page_that_is_full_is_followed_by_another_look(
    polls: Completions, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completions, "MOST_COMPLETIONS", 2)
    journal.most = 2
    for number in (1, 2, 3):
        journal.resolve(number)
    assert await told(polls, 0) == [1, 2]
    assert await told(polls, 2) == [3]


async def test_who_was_told_all_looks_now_and_then_all_the_same(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completions, "_TOLD_S", 0.05)
    of: Any = journal
    polls = Completions(of, of, of)
    await told(polls, 0)
    journal.kept.append(resolved(1))
    await asyncio.sleep(0.06)
    assert await told(polls, 0) == [1]
