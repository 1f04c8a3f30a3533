"""When an engine counts as stuck."""

from __future__ import annotations

import asyncio

import pytest

from services.common.contract.errors import Unavailable
from services.sampler.engine.watchdog import Progress, until_stuck


def test_an_engine_that_finishes_steps_is_never_stuck() -> None:
    progress = Progress(10, now=0)
    for second in range(100):
        progress.note(running=5, steps=second // 9, now=second)
        assert not progress.stuck(second)


def test_an_engine_that_answers_but_finishes_no_step_of_its_requests_is_stuck() -> None:
    progress = Progress(10, now=0)
    progress.note(running=0, steps=7, now=3)
    for second in range(4, 13):
        progress.note(running=1, steps=7, now=second)
        assert not progress.stuck(second)
    assert progress.stuck(13)


def test_an_idle_engine_that_answers_is_not_stuck_however_long_it_idles() -> None:
    progress = Progress(10, now=0)
    progress.note(running=0, steps=7, now=1000)
    assert not progress.stuck(1009)
    progress.note(running=1, steps=7, now=1009)
    assert progress.stuck(1010)


@pytest.mark.parametrize("running", [0, 3])
def test_an_engine_that_does_not_answer_is_stuck_whether_requests_run_or_not(running: int) -> None:
    progress = Progress(10, now=0)
    progress.note(running=running, steps=None, now=9)
    assert not progress.stuck(9)
    progress.note(running=running, steps=None, now=10)
    assert progress.stuck(10)


class Engine:
    """Does a step whenever it is asked, until it hangs or answers with errors."""

    def __init__(self) -> None:
        self.running = 1
        self.at_rest = False
        self.made = 0
        self.asked = 0
        self.hangs = False
        self.fails = False

    async def steps(self) -> int:
        self.asked += 1
        if self.hangs:
            await asyncio.Event().wait()
        if self.fails:
            raise Unavailable("no answer")
        self.made += not self.at_rest
        return self.made


@pytest.mark.parametrize("fault", ["hangs", "fails"])
async def test_the_watch_ends_when_the_engine_hangs_or_only_fails(fault: str) -> None:
    engine = Engine()
    watch = asyncio.create_task(until_stuck(engine, 1.0))
    await asyncio.sleep(2.2)
    assert not watch.done()
    setattr(engine, fault, True)
    await asyncio.wait_for(watch, 60)


async def test_an_engine_at_rest_makes_no_steps_and_has_to_answer() -> None:
    engine = Engine()
    engine.at_rest = True
    watch = asyncio.create_task(until_stuck(engine, 0.2))
    while engine.asked < 30:
        assert not watch.done()
        await asyncio.sleep(0.01)
    engine.hangs = True
    await asyncio.wait_for(watch, 60)


async def test_a_watch_that_is_cancelled_leaves_no_question_behind() -> None:
    engine = Engine()
    engine.hangs = True
    watch = asyncio.create_task(until_stuck(engine, 60))
    await asyncio.sleep(0.05)
    watch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watch
    assert engine.asked == 1
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "steps of the engine"]
