"""How weight groups end that nobody wants any more."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
import torch

from services.common.weights import WeightGroup
from services.trainer.publish import leaving
from services.trainer.publish.leaving import Leaving


class Ending(WeightGroup):
    """A group whose end is what a test makes of it."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__(epoch=1, rank=0)
        self.may_end = threading.Event()
        self.begun = threading.Event()
        self._error = error

    def _broadcast_bucket(self, bucket: torch.Tensor, timeout: float) -> None:
        raise NotImplementedError

    def _abort_medium(self) -> None:
        self.begun.set()
        assert self.may_end.wait(60)
        if self._error is not None:
            raise self._error


@pytest.fixture
def stuck() -> Iterator[Ending]:
    group = Ending()
    yield group
    group.may_end.set()


def counted(why: str) -> float:
    return leaving.NOT_LEFT.labels(why)._value.get()


async def until_left(sender: Leaving, seconds: float = 30) -> None:
    async with asyncio.timeout(seconds):
        while sender._watched or sender._under_way:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_the_loop_goes_on_while_a_group_is_stuck_on_its_way_out(stuck: Ending) -> None:
    sender = Leaving()
    sender.give_up(stuck)
    # This runs on the loop, which a call that blocks there would never come back to.
    assert await asyncio.to_thread(stuck.begun.wait, 30)
    ended = Ending()
    ended.may_end.set()
    late, failed = counted("late"), counted("failed")
    sender.give_up(ended)
    assert await asyncio.to_thread(ended.begun.wait, 30)
    stuck.may_end.set()
    await until_left(sender)
    assert (counted("late"), counted("failed")) == (late, failed)


async def test_an_end_that_fails_is_counted_and_told(caplog: pytest.LogCaptureFixture) -> None:
    group = Ending(RuntimeError("the communicator is gone"))
    group.may_end.set()
    failed = counted("failed")
    sender = Leaving()
    sender.give_up(group)
    await until_left(sender)
    assert counted("failed") == failed + 1
    assert "the communicator is gone" in caplog.text


async def test_an_end_that_is_late_is_counted_once(stuck: Ending, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving, "ABORT_TIMEOUT_S", 0.05)
    late, failed = counted("late"), counted("failed")
    stuck._error = RuntimeError("too late to be news")
    sender = Leaving()
    sender.give_up(stuck)
    async with asyncio.timeout(60):
        while sender._watched:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert sender._under_way == 1
    stuck.may_end.set()
    await until_left(sender)
    assert (counted("late"), counted("failed")) == (late + 1, failed)


async def test_with_too_many_on_their_way_out_there_is_no_room_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leaving, "MOST_UNDER_WAY", 2)
    sender = Leaving()
    aborted, joined = Ending(), Ending()
    join: asyncio.Future[WeightGroup] = asyncio.get_running_loop().create_future()
    assert sender.has_room
    sender.give_up(aborted)
    assert sender.has_room
    sender.give_up_once_joined(join)
    assert not sender.has_room
    aborted.may_end.set()
    join.set_result(joined)
    assert await asyncio.to_thread(joined.begun.wait, 30)
    joined.may_end.set()
    await until_left(sender)
    assert sender.has_room


async def test_closing_does_not_wait_for_what_is_stuck(
    stuck: Ending, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaving, "_CLOSE_S", 0.05)
    sender = Leaving()
    sender.give_up(stuck)
    await sender.close()
    assert not stuck.may_end.is_set() and not sender._watched
