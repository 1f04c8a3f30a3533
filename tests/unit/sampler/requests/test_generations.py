"""One generation for each request, however often it is asked for, and what ends it."""

from __future__ import annotations

import asyncio

import pytest

from services.common.contract.errors import Cancelled, Draining, Internal, Overloaded
from services.sampler.requests.generations import Generations

ID = "session:sample:0:1"
GRACE_S = 0.5


class Engine:
    """Generates answers of ten bytes; counts how often."""

    def __init__(self) -> None:
        self.begun = 0
        self.ended = 0
        self.failure: Exception | None = None
        self.gate = asyncio.Event()
        self.now = 100.0
        self.generations: Generations[str] = Generations(
            lambda answer: None if answer == "refused" else 10,
            grace=GRACE_S,
            kept_seconds=60,
            kept_bytes=25,
            clock=lambda: self.now,
        )

    async def make(self) -> str:
        self.begun += 1
        number = self.begun
        try:
            await self.gate.wait()
        finally:
            self.ended += 1
        if self.failure is not None:
            raise self.failure
        return f"answer {number}"

    def ask(self, request_id: str = ID, digest: bytes = b"d", seconds: float | None = None) -> asyncio.Task:
        return asyncio.create_task(self.generations.answer(request_id, digest, self.make, seconds))


@pytest.fixture
def engine() -> Engine:
    return Engine()


async def given_up(task: asyncio.Task) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_repeat_joins_what_runs(engine: Engine) -> None:
    asked = [engine.ask() for _ in range(3)]
    await asyncio.sleep(0.01)
    engine.gate.set()
    assert [await task for task in asked] == ["answer 1"] * 3
    assert engine.begun == 1


async def test_a_repeat_of_what_has_just_finished_generates_nothing(engine: Engine) -> None:
    engine.gate.set()
    assert [await engine.ask() for _ in range(3)] == ["answer 1"] * 3
    assert (engine.begun, engine.generations.knows(ID)) == (1, True)


async def test_another_waiter_keeps_a_generation_going_when_one_goes_away(engine: Engine) -> None:
    first, second = engine.ask(), engine.ask()
    await asyncio.sleep(0.01)
    await given_up(first)
    await asyncio.sleep(3 * GRACE_S)
    engine.gate.set()
    assert (await second, engine.begun) == ("answer 1", 1)


async def test_a_gateway_that_comes_back_in_time_finds_its_generation_still_running(engine: Engine) -> None:
    first = engine.ask()
    await asyncio.sleep(0.01)
    await given_up(first)
    await asyncio.sleep(GRACE_S / 2)
    assert engine.generations.knows(ID)
    again = engine.ask()
    await asyncio.sleep(2 * GRACE_S)
    engine.gate.set()
    assert (await again, engine.begun) == ("answer 1", 1)


async def test_a_generation_that_ends_while_nobody_waits_is_kept_for_who_asks_again(engine: Engine) -> None:
    first = engine.ask()
    await asyncio.sleep(0.01)
    await given_up(first)
    engine.gate.set()
    await asyncio.sleep(0.01)
    assert (await engine.ask(), engine.begun) == ("answer 1", 1)


async def test_a_generation_that_nobody_waits_for_ends_after_a_while(engine: Engine) -> None:
    first = engine.ask()
    await asyncio.sleep(0.01)
    await given_up(first)
    assert engine.ended == 0
    await asyncio.sleep(2 * GRACE_S)
    assert (engine.ended, engine.generations.knows(ID)) == (1, False)


async def test_giving_up_by_name_ends_it_at_once_whoever_waits(engine: Engine) -> None:
    asked = [engine.ask(), engine.ask()]
    await asyncio.sleep(0.01)
    assert engine.generations.give_up(ID)
    for task in asked:
        with pytest.raises(Cancelled, match="given up"):
            await task
    assert (engine.ended, engine.generations.knows(ID)) == (1, False)
    assert not engine.generations.give_up(ID)


async def test_who_asks_while_a_generation_is_being_given_up_gets_a_new_one(engine: Engine) -> None:
    first = engine.ask()
    await asyncio.sleep(0.01)
    engine.generations.give_up(ID)
    again = engine.ask()
    engine.gate.set()
    assert await again == "answer 2"
    with pytest.raises(Cancelled):
        await first


async def test_who_does_not_want_to_wait_longer_hears_that_it_still_runs(engine: Engine) -> None:
    assert await engine.ask(seconds=0.02) is None
    assert await engine.ask(seconds=0.02) is None
    engine.gate.set()
    assert (await engine.ask(seconds=5), engine.begun) == ("answer 1", 1)


async def test_another_content_is_another_request_whatever_its_id(engine: Engine) -> None:
    old = engine.ask()
    await asyncio.sleep(0.01)
    new = engine.ask(digest=b"other")
    engine.gate.set()
    with pytest.raises(Cancelled, match="same id"):
        await old
    assert await new == "answer 2"
    assert await engine.ask() == "answer 3"


async def test_a_failure_reaches_all_who_wait_and_is_not_kept(engine: Engine) -> None:
    engine.failure = Internal("a kernel failed")
    asked = [engine.ask(), engine.ask()]
    engine.gate.set()
    for task in asked:
        with pytest.raises(Internal):
            await task
    engine.failure = None
    assert (await engine.ask(), engine.begun) == ("answer 2", 2)


async def test_that_a_sampler_is_full_is_no_news_for_its_log_and_another_failure_is(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.gate.set()
    for number, failure in enumerate((Overloaded("full"), Internal("broken"))):
        engine.failure = failure
        with pytest.raises(type(failure)):
            await engine.ask(f"session:sample:0:{number}")
    assert "broken" in caplog.text and "full" not in caplog.text


async def test_what_is_kept_is_bounded_in_bytes_and_in_time(engine: Engine) -> None:
    engine.gate.set()
    for number in range(3):
        await engine.ask(f"{ID}{number}")
    assert [engine.generations.knows(f"{ID}{number}") for number in range(3)] == [False, True, True]
    engine.now += 61
    assert not engine.generations.knows(f"{ID}2")
    assert await engine.ask(f"{ID}2") == "answer 4"


async def test_an_answer_without_a_size_is_not_kept(engine: Engine) -> None:
    async def refuse() -> str:
        return "refused"

    assert await engine.generations.answer(ID, b"d", refuse) == "refused"
    assert not engine.generations.knows(ID)


async def test_at_the_end_what_runs_may_finish_and_the_others_are_told_why_not(engine: Engine) -> None:
    asked = engine.ask()
    await asyncio.sleep(0.01)
    ending = asyncio.create_task(engine.generations.end(5, Draining("stopping")))
    await asyncio.sleep(0.01)
    engine.gate.set()
    await ending
    assert await asked == "answer 1"
    engine.gate.clear()
    asked = engine.ask("other")
    await asyncio.sleep(0.01)
    await engine.generations.end(0.02, Draining("stopping"))
    with pytest.raises(Draining, match="stopping"):
        await asked
