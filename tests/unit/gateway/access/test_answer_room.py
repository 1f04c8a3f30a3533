"""Memory for answers: shared between keys, waited for, and refused where it never comes."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from services.common.contract.errors import InvalidRequest, LimitReached, TooLarge
from services.gateway.access.answer_room import PASSED_TIMES, AnswerRoom, Together
from services.gateway.inference.question import Question, bounded


async def test_an_answer_waits_for_room_and_gives_it_back_however_it_ends() -> None:
    room = AnswerRoom(100)
    with room.account("ann") as first, room.account("ann") as second:
        await first.take(40)
        waiting = asyncio.create_task(second.take(20))
        await asyncio.sleep(0)
        assert not waiting.done()
        assert not second.take_now(20)
        first.give(30)
        async with asyncio.timeout(60):
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


async def test_what_never_fits_or_not_for_long_is_refused_with_its_limit() -> None:
    room = AnswerRoom(100)
    with room.account("ann") as first, room.account("ann") as second:
        with pytest.raises(TooLarge, match="--memory-mib"):
            await first.take(51)
        await first.take(40)
        with pytest.raises(LimitReached, match="--memory-mib"):
            await second.take(20, seconds=0.01)


async def test_answers_of_several_parts_do_not_wait_for_each_other() -> None:
    room = AnswerRoom(100)
    with room.account("ann") as one, room.account("ann") as other:
        first, second = Together(one, 2), Together(other, 2)
        parts = [asyncio.create_task(answer.take(20)) for _ in range(2) for answer in (first, second)]
        async with asyncio.timeout(60):
            # Piece by piece each would hold 20 of 50, and wait for 20 more.
            await asyncio.gather(parts[0], parts[2])
        assert (room.held, one.held, parts[1].done(), parts[3].done()) == (40, 40, False, False)
        one.give(40)
        async with asyncio.timeout(60):
            await asyncio.gather(parts[1], parts[3])
        assert room.held == 40
    assert room.held == 0


async def test_answers_of_a_key_get_room_in_the_order_in_which_they_ask() -> None:
    room, got = AnswerRoom(100), []

    async def ask(owner: str, nbytes: int) -> None:
        with room.account(owner) as account:
            await account.take(nbytes)
            got.append((owner, nbytes))
            await asyncio.sleep(0)

    with room.account("ann") as first:
        await first.take(40)
        # The large one first, which small ones would pass by for ever; another key waits for neither.
        asked = [("ann", 45), ("ann", 1), ("ann", 2), ("bob", 12), ("bob", 4)]
        tasks = [asyncio.create_task(ask(*one)) for one in asked]
        await asyncio.sleep(0)
        assert not first.take_now(1)
        await asyncio.wait([tasks[3], tasks[4]], timeout=5)
        assert got == [("bob", 12), ("bob", 4)]
        first.give(40)
        async with asyncio.timeout(60):
            await asyncio.gather(*tasks)
    assert got[2:] == [("ann", 45), ("ann", 1), ("ann", 2)]
    assert (room.held, room._waiting) == (0, {})


async def test_what_is_very_small_passes_by_what_waits() -> None:
    room = AnswerRoom(10_240)
    with room.account("ann") as first, room.account("ann") as second:
        await first.take(4000)
        waiting = asyncio.create_task(second.take(4000))
        await asyncio.sleep(0)
        assert [first.take_now(nbytes) for nbytes in (0, 10, 11)] == [True, True, False]
        first.give(first.held)
        async with asyncio.timeout(60):
            await waiting


async def test_who_gives_up_at_the_head_lets_those_behind_it_go_on() -> None:
    room = AnswerRoom(100)
    with room.account("ann") as first, room.account("ann") as second, room.account("ann") as third:
        await first.take(20)
        large = asyncio.create_task(second.take(40, seconds=0.05))
        await asyncio.sleep(0)
        small = asyncio.create_task(third.take(10))
        with pytest.raises(LimitReached):
            await large
        async with asyncio.timeout(60):
            await small
        assert (room.held, room._waiting) == (30, {})


async def test_who_gives_up_just_when_it_gets_room_holds_nothing() -> None:
    room = AnswerRoom(100)
    with room.account("ann") as first, room.account("ann") as second:
        await first.take(40)
        waiting = asyncio.create_task(second.take(20))
        await asyncio.sleep(0)
        first.give(40)
        await asyncio.sleep(0)
        assert room.held == 20 and not waiting.done()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (second.held, room.held) == (0, 0)


async def test_what_is_given_back_goes_to_all_that_it_has_room_for() -> None:
    room = AnswerRoom(100)
    with room.account("ann") as first, room.account("ann") as second, room.account("ann") as third:
        await first.take(45)
        waiting = [asyncio.create_task(account.take(20)) for account in (second, third)]
        await asyncio.sleep(0)
        first.give(45)
        async with asyncio.timeout(60):
            await asyncio.gather(*waiting)
        assert room.held == 40


async def test_keys_that_wait_get_room_in_turn() -> None:
    room, got = AnswerRoom(100), []

    async def ask(owner: str) -> None:
        with room.account(owner) as account:
            await account.take(14)
            got.append(owner)

    with room.account("eve") as eve, room.account("zed") as zed:
        await eve.take(50)
        await zed.take(24)
        tasks = [asyncio.create_task(ask(owner)) for owner in ("ann", "ann", "bob", "bob")]
        await asyncio.sleep(0)
        assert not got
        # Room for one of them at a time.
        zed.give(4)
        async with asyncio.timeout(60):
            await asyncio.gather(*tasks)
    assert got == ["ann", "bob", "ann", "bob"]


def test_a_result_counts_several_times_and_never_for_more_than_an_eighth() -> None:
    room = AnswerRoom(8000)
    assert (room.of_result(10), room.of_result(10**6)) == (10 * PASSED_TIMES, 1000)


BESIDES = Question([[1]]).told_besides(0)


def test_a_question_whose_answer_may_be_too_large_is_refused_with_the_number() -> None:
    largest = 64 * (8 * 1000 + BESIDES)
    bounded(Question([[1]], max_tokens=1000, scored=True), largest)
    bounded(Question([[1]], max_tokens=8000), largest)
    for question in (
        Question([[1]], max_tokens=1001, scored=True),
        Question([[1]], max_tokens=8000 + BESIDES),
        Question([[1]], max_tokens=100, num_samples=11, scored=True),
        Question([[1]] * 11, max_tokens=100, scored=True),
        Question([[1]], max_tokens=100, scored=True, likely=10),
        Question([[1] * 500], max_tokens=1, scored=True, prompt_likely=1, echo=True),
        Question([[1] * 100], max_tokens=1, num_samples=80, echo=True),
    ):
        with pytest.raises(
            InvalidRequest, match=r"which may have [0-9]+ besides its prompts \(--memory-mib\)"
        ):
            bounded(question, largest)


@pytest.mark.parametrize(
    "question",
    [
        Question([[1]]),
        Question([[1]], scored=True, likely=20),
        Question([[1] * 10] * 3, num_samples=2, scored=True, likely=5),
        Question([[1] * 10] * 2, scored=True, prompt_likely=2, echo=True),
    ],
)
def test_without_a_length_a_question_has_the_one_that_its_answer_has_room_for(question: Question) -> None:
    largest = 2**20
    found = bounded(question, largest)
    assert found.max_tokens is not None and found.max_tokens > 1
    assert replace(found, max_tokens=None) == question

    def takes(max_tokens: int) -> int:
        """The memory of the largest answer, as samplers tell it."""
        sampled = question.num_samples * max_tokens * (1 + question.likely)
        return sum(
            question.times * (question.told_besides(prompt) + 8 * sampled)
            for prompt in range(len(question.prompts))
        )

    assert takes(found.max_tokens) <= largest < takes(found.max_tokens + 1)
    with pytest.raises(InvalidRequest):
        bounded(replace(question, max_tokens=found.max_tokens + 1), largest)


def test_a_question_that_has_no_room_for_one_token_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="lower"):
        bounded(Question([[1]] * 100, num_samples=100, scored=True, likely=20), 2**20)
