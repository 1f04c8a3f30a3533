"""Grammars are made a few at a time, and those that take long keep others waiting for a moment only."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from services.sampler.engine.grammars import makers as module
from services.sampler.engine.grammars.makers import Makers
from services.sampler.engine.grammars.steps import Busy


def asked(constraint: str) -> Any:
    return SimpleNamespace(structured_output_request=SimpleNamespace(structured_output_key=constraint))


class Wanted:
    """A request."""

    structured_output_request = SimpleNamespace(structured_output_key="slow")


class Makings:
    """What is made: of constraints that begin with "slow" not before it is over."""

    def __init__(self) -> None:
        self.over, self.begun = threading.Event(), list[str]()

    def __call__(self, request: Any) -> str:
        constraint = str(request.structured_output_request.structured_output_key)
        self.begun.append(constraint)
        if constraint.startswith("slow"):
            self.over.wait(60)
        if constraint == "none":
            raise ValueError("no grammar")
        return constraint.upper()


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Makings]:
    monkeypatch.setattr(module, "LONG_S", 1.0)
    monkeypatch.setattr(module, "MOST_LONG", 2)
    makings = Makings()
    yield makings
    makings.over.set()


def until(makers: Makers, true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        makers.look()
        time.sleep(0.01)


def test_grammars_are_made_in_order_and_one_that_cannot_be_says_why(make: Makings) -> None:
    makers = Makers(1)
    made = [makers.submit(make, asked(each)) for each in ("a", "none", "a", "b")]
    assert made[0].result(30) == "A"
    with pytest.raises(ValueError, match="no grammar"):
        made[1].result(30)
    assert [each.result(30) for each in made[2:]] == ["A", "B"]


def test_what_takes_long_keeps_its_place_for_a_moment_and_beyond_a_bound_for_ever(make: Makings) -> None:
    makers = Makers(1)
    slow = [makers.submit(make, asked(f"slow {number}")) for number in range(3)]
    quick = makers.submit(make, asked("quick"))
    until(makers, lambda: bool(make.begun))
    assert make.begun == ["slow 0"]
    until(makers, lambda: len(make.begun) == 3)
    time.sleep(1.2)
    makers.look()
    assert make.begun == ["slow 0", "slow 1", "slow 2"]
    assert not quick.running()
    make.over.set()
    until(makers, quick.done)
    assert quick.result() == "QUICK"
    assert [each.result(30) for each in slow] == ["SLOW 0", "SLOW 1", "SLOW 2"]


def test_a_constraint_that_many_ask_for_takes_one_place(make: Makings) -> None:
    makers = Makers(1)
    began = time.monotonic()
    twins = [makers.submit(make, asked("slow")) for _ in range(9)]
    quick = makers.submit(make, asked("quick"))
    until(makers, quick.done)
    since = makers.since("slow")
    assert since is not None and since - began < 30
    assert make.begun == ["slow", "quick"]
    until(makers, lambda: makers.since("quick") is None)
    make.over.set()
    until(makers, lambda: all(each.done() for each in twins))
    assert {each.result() for each in twins} == {"SLOW"}


def test_what_takes_long_comes_after_all_others_with_all_threads_that_it_began(make: Makings) -> None:
    threads = list[int]()

    def note(wait: bool) -> None:
        threads.append(threading.get_native_id())
        if wait:
            make.over.wait(60)

    def make_with_another(request: Any) -> int:
        note(wait=False)
        other = threading.Thread(target=note, args=(True,))
        other.start()
        other.join()
        return os.getpriority(os.PRIO_PROCESS, 0)

    makers, usual = Makers(1), os.getpriority(os.PRIO_PROCESS, 0)
    slow = makers.submit(make_with_another, asked("a"))
    behind = makers.submit(make_with_another, asked("a"))
    until(makers, lambda: len(threads) == 2)

    def nice(value: int) -> bool:
        return [os.getpriority(os.PRIO_PROCESS, thread) for thread in threads] == [value, value]

    until(makers, lambda: nice(10))
    makers.give_up("a")
    assert nice(19)
    make.over.set()
    assert slow.result(30) == 19
    until(makers, behind.done)
    assert behind.result() == usual < 10


def test_what_was_given_up_before_its_turn_is_not_made(make: Makings) -> None:
    makers = Makers(1)
    slow, wanted = makers.submit(make, asked("slow")), Wanted()
    held = weakref.ref(wanted)
    futures: list[Future[Any]] = [makers.submit(make, asked(each)) for each in ("a", "a", "b")]
    futures.append(makers.submit(make, wanted))
    del wanted
    assert all(futures[each].cancel() for each in (0, 2, 3))
    assert held() is None, "what waits for long behind another one keeps no prompt"
    make.over.set()
    assert slow.result(30) == "SLOW"
    assert futures[1].result(30) == "A"
    assert make.begun == ["slow", "a"]


def test_where_no_thread_can_be_begun_it_is_said_to_be_busy_and_takes_no_place(
    make: Makings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    makers = Makers(1)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(Busy, match="new thread"):
            makers.submit(make, asked("a")).result(0)
    assert makers.submit(make, asked("a")).result(30) == "A"


def test_an_end_waits_for_nothing(make: Makings) -> None:
    makers = Makers(1)
    makers.submit(make, asked("slow"))
    never = makers.submit(make, asked("a"))
    makers.shutdown(wait=True, cancel_futures=True)
    make.over.set()
    time.sleep(0.1)
    assert not never.done()
