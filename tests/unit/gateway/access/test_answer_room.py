"""Memory for answers: shared between keys, waited for, and refused where it never comes."""

from __future__ import annotations

import asyncio

import pytest

from services.common.contract.errors import InvalidRequest, LimitReached, TooLarge
from services.gateway.access import answer_room
from services.gateway.access.answer_room import AnswerRoom
from services.gateway.inference.question import Question, check_answer


async def test_an_answer_waits_for_room_and_gives_it_back_however_it_ends() -> None:
    room = AnswerRoom(100)
    with room.account("ann") as first, room.account("ann") as second:
        await first.take(40)
        waiting = asyncio.create_task(second.take(20))
        await asyncio.sleep(0)
        assert not waiting.done()
        assert not second.take_now(20)
        first.give(30)
        async with asyncio.timeout(5):
            await waiting
        assert room.held == 30
    assert room.held == 0


async def test_one_key_leaves_room_for_others() -> None:
    room = AnswerRoom(100)
    with room.account("ann") as ann, room.account("bob") as bob:
        while ann.take_now(10):
            pass
        assert ann.held == 50
        assert bob.take_now(20)


async def test_who_gives_up_waiting_holds_nothing() -> None:
    room = AnswerRoom(100)
    with room.account("ann") as first, room.account("ann") as second:
        await first.take(40)
        waiting = asyncio.create_task(second.take(20))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (second.held, room.held) == (0, 40)


async def test_what_never_fits_or_not_for_long_is_refused_with_its_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answer_room, "_WAIT_S", 0.01)
    room = AnswerRoom(100)
    with room.account("ann") as first, room.account("ann") as second:
        with pytest.raises(TooLarge, match="--memory-mib"):
            await first.take(51)
        await first.take(40)
        with pytest.raises(LimitReached, match="--memory-mib"):
            await second.take(20)


def test_a_question_whose_answer_may_be_too_large_is_refused_with_the_number() -> None:
    largest = 8 * 64 * 1000
    check_answer(Question([[1]], max_tokens=1000, scored=True), largest)
    check_answer(Question([[1]], max_tokens=8000), largest)
    check_answer(Question([[1]], num_samples=1000, scored=True, likely=20), largest)
    for question in (
        Question([[1]], max_tokens=1001, scored=True),
        Question([[1]], max_tokens=8001),
        Question([[1]], max_tokens=100, num_samples=11, scored=True),
        Question([[1]] * 11, max_tokens=100, scored=True),
        Question([[1]], max_tokens=100, scored=True, likely=10),
        Question([[1] * 500], max_tokens=1, scored=True, prompt_likely=1, echo=True),
        Question([[1] * 100], max_tokens=1, num_samples=80, echo=True),
    ):
        with pytest.raises(InvalidRequest, match=r"which may have (1000|8000) \(--memory-mib\)"):
            check_answer(question, largest)
