"""Time by two clocks."""

from __future__ import annotations

import logging
import time

import pytest

from services.common.process import clock


def test_without_redis_there_is_one_clock() -> None:
    before = time.time()
    assert before <= clock.to_judge() <= clock.to_note() <= time.time()


@pytest.mark.parametrize("ahead", [-500.0, 500.0])
def test_the_later_clock_notes_and_the_earlier_judges(ahead: float) -> None:
    now = time.time()
    clock.hear(now + ahead)
    assert clock.to_note() == pytest.approx(max(now, now + ahead), abs=5)
    assert clock.to_judge() == pytest.approx(min(now, now + ahead), abs=5)


@pytest.mark.parametrize("jump", [-500.0, 500.0])
def test_a_clock_that_is_set_moves_that_of_redis_not(monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    now, set_to = time.time(), time.time() + jump
    clock.hear(now)
    monkeypatch.setattr(time, "time", lambda: set_to)
    assert clock.to_note() == pytest.approx(max(now, set_to), abs=5)
    assert clock.to_judge() == pytest.approx(min(now, set_to), abs=5)


def test_clocks_that_differ_are_told_of_once_and_again_when_they_had_agreed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        for ahead in (0.0, 300.0, 300.0, 1.0, -300.0):
            clock.hear(time.time() + ahead)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "300 s behind that of Redis" in said[0] and "300 s ahead of that of Redis" in said[1]
