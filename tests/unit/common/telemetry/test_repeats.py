"""Failures that repeat are said when they begin, now and then, and when they end."""

from __future__ import annotations

import logging

import pytest

from services.common.contract.errors import Overloaded
from services.common.telemetry import repeats
from services.common.telemetry.repeats import SAY_AGAIN_S, Repeats

log = logging.getLogger("some work")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, clock: Clock) -> tuple[Repeats, pytest.LogCaptureFixture]:
    caplog.set_level(logging.INFO)
    return Repeats(log, "not written", clock), caplog


def test_the_first_of_each_name_is_said_and_what_follows_once_in_a_while_with_its_number(
    said: tuple[Repeats, pytest.LogCaptureFixture], clock: Clock
) -> None:
    writes, caplog = said
    for _ in range(1000):
        for name in ("a", "b"):
            writes.failed(name, "no space")
        clock.now += 1
    first, second, again = caplog.messages
    assert (first, second) == ("not written: a: no space", "not written: b: no space")
    # The first that was not said came a second after the begin, and with it SAY_AGAIN_S more seconds.
    assert again == f"not written: {2 * int(SAY_AGAIN_S) + 1} more times in 600 s, the last a: no space"


def test_the_end_of_a_streak_is_said_and_the_next_one_begins_anew(
    said: tuple[Repeats, pytest.LogCaptureFixture],
) -> None:
    writes, caplog = said
    writes.over("a")
    for _ in range(3):
        writes.failed("a", "no space")
    writes.over("a")
    writes.over("a")
    writes.failed("a", "no disk")
    assert caplog.messages == [
        "not written: a: no space",
        "not written: no more of a, after 3 failures",
        "not written: a: no disk",
    ]


def test_what_has_not_failed_for_long_begins_a_streak_of_its_own(
    said: tuple[Repeats, pytest.LogCaptureFixture], clock: Clock
) -> None:
    writes, caplog = said
    writes.failed("a", "no space")
    clock.now += SAY_AGAIN_S
    writes.failed("a", "no disk")
    assert caplog.messages == ["not written: a: no space", "not written: a: no disk"]


def test_of_too_many_names_only_the_number_is_said_until_others_are_forgotten(
    said: tuple[Repeats, pytest.LogCaptureFixture], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeats, "_MOST_NAMES", 2)
    writes, caplog = said
    for name in ("a", "b", "c", "d"):
        writes.failed(name, "no space")
    assert caplog.messages == ["not written: a: no space", "not written: b: no space"]
    clock.now += SAY_AGAIN_S
    writes.failed("c", "no space")
    assert caplog.messages[2:] == ["not written: c: no space"]
    assert len(writes._streaks) == 1


def test_the_place_of_an_error_is_said_once(said: tuple[Repeats, pytest.LogCaptureFixture]) -> None:
    writes, caplog = said
    for _ in range(2):
        try:
            raise ZeroDivisionError("by nothing")
        except ZeroDivisionError as error:
            writes.failed("a", error, foreseen=False)
    assert caplog.text.count("Traceback") == 1
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_another_reason_is_said_too_and_once_whatever_its_numbers(
    said: tuple[Repeats, pytest.LogCaptureFixture],
) -> None:
    writes, caplog = said
    for number in range(3):
        writes.failed("a", ConnectionError(f"{number} tries"))
        writes.failed("a", Overloaded(f"{number} GPUs are away", "adapters_in_use"))
        writes.failed("a", f"volume 7c{number}f is full")
        writes.failed("a", "a volume is away")
        writes.failed("a", Overloaded(f"{number} MiB in use", "adapters_in_use"))
        writes.failed("a", OSError(28, "No space left on device"))
        writes.failed("a", OSError(30, "Read-only file system"))
    assert caplog.messages == [
        "not written: a: 0 tries",
        "not written: a: 0 GPUs are away",
        "not written: a: volume 7c0f is full",
        "not written: a: a volume is away",
        "not written: a: 0 MiB in use",
        "not written: a: [Errno 28] No space left on device",
        "not written: a: [Errno 30] Read-only file system",
    ]
