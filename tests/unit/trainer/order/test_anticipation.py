"""Which pass waits for whom, from plain numbers."""

from __future__ import annotations

import pytest

from services.trainer.order.anticipation import Anticipation, Habit
from services.trainer.order.scheduler import Limits

LIMITS = Limits(micro_batches=1, micro_batch_tokens=1024)
PASS_S = 0.4


def anticipation() -> Anticipation:
    """Of a trainer whose small passes take 0.4 s, so that one waits for 0.2 s at most."""
    made = Anticipation(LIMITS)
    for waited in (60.0, 0.0, 5.0, 0.1):
        made.passed(16, PASS_S + waited)
    return made


def away(since: float, usual_s: float = 0.02, tokens: int = 16) -> Habit:
    """Of a model whose step ended then, and that came back as soon as that the last time."""
    habit = Habit()
    habit.stepped(0.0)
    habit.asked(tokens, usual_s)
    habit.stepped(since)
    return habit


def test_a_small_pass_waits_until_the_models_that_were_just_stepped_should_be_back() -> None:
    others = [away(10.0, 0.02), away(10.01, 0.04)]
    assert anticipation().patience(16, others, 10.02) == pytest.approx(10.01 + 1.5 * 0.04 - 10.02)


def test_it_waits_no_longer_than_half_of_a_small_pass_in_all() -> None:
    waiting = anticipation()
    assert waiting.patience(16, [away(10.0, 0.1)], 10.0) > 0
    assert waiting.patience(16, [away(10.1, 0.09)], 10.1) == pytest.approx(0.1)
    late = away(10.12, 0.09)
    assert waiting.patience(16, [late], 10.12) == 0.0
    waiting.ends()
    assert waiting.patience(16, [late], 10.12) > 0


def test_a_model_that_stays_away_is_waited_for_once() -> None:
    gone, waiting = away(10.0), anticipation()
    assert waiting.patience(16, [gone], 10.0) > 0
    assert waiting.patience(16, [gone], 10.031) == 0.0
    waiting.ends()
    assert waiting.patience(16, [gone], 11.0) == 0.0


def test_one_that_stays_away_is_waited_for_once_whatever_it_took_before() -> None:
    gone, waiting = Habit(tokens=16, last_s=(0.5, 0.19, 0.02, 0.02), stepped_at=10.0), anticipation()
    now, waits = 10.0, []
    for _ in range(6):
        waits.append(waiting.patience(16, [gone], now))
        now += waits[-1]
        assert waiting.patience(16, [gone], now) == 0.0
        waiting.ends()
        now += PASS_S
    assert waits == [pytest.approx(0.2), 0, 0, 0, 0, 0]


def test_a_model_that_takes_its_time_is_not_waited_for() -> None:
    assert anticipation().patience(16, [away(10.0, 0.21)], 10.0) == 0.0


def test_one_pause_is_no_habit_and_two_are() -> None:
    habit = away(10.0)
    habit.asked(16, 13.0)
    habit.stepped(14.0)
    assert anticipation().patience(16, [habit], 14.0) == pytest.approx(0.03)
    habit.asked(16, 17.0)
    habit.stepped(18.0)
    assert anticipation().patience(16, [habit], 18.0) == 0.0


def test_a_model_is_waited_for_as_long_as_it_took_when_it_came_back_last_of_several() -> None:
    habit = away(10.0, 0.08)
    for number in range(3):
        habit.asked(16, 10.02 + number)
        habit.stepped(11.0 + number)
    assert anticipation().patience(16, [habit], 13.0) == pytest.approx(1.5 * 0.08)
    habit.asked(16, 13.02)
    habit.stepped(14.0)
    assert anticipation().patience(16, [habit], 14.0) == pytest.approx(1.5 * 0.02), "that was too long ago"


def test_a_model_that_has_come_is_not_waited_for() -> None:
    back = away(10.0)
    back.asked(16, 10.01)
    assert anticipation().patience(16, [back], 10.01) == 0.0


@pytest.mark.parametrize("habit", [Habit(), Habit(tokens=16, stepped_at=10.0)])
def test_a_model_of_which_nothing_is_known_is_not_waited_for(habit: Habit) -> None:
    assert anticipation().patience(16, [habit], 10.0) == 0.0


def test_a_model_that_asks_for_something_else_after_its_steps_is_known_by_its_batches_alone() -> None:
    habit = Habit()
    habit.stepped(1.0)
    habit.asked(None, 1.01)
    habit.asked(16, 3.0)
    habit.stepped(4.0)
    assert anticipation().patience(16, [habit], 4.0) == 0.0


@pytest.mark.parametrize(("tokens", "others"), [(120, 16), (16, 120), (1024, 16)])
def test_passes_that_would_not_be_small_together_wait_for_nobody(tokens: int, others: int) -> None:
    assert anticipation().patience(tokens, [away(10.0, tokens=others)], 10.0) == 0.0


def test_without_small_passes_to_go_by_nobody_is_waited_for() -> None:
    waiting = Anticipation(LIMITS)
    for tokens in (1024, 1024, 16, 16, 16):
        waiting.passed(tokens, PASS_S)
    assert waiting.patience(16, [away(10.0)], 10.0) == 0.0


def test_several_ranks_have_room_for_more_that_is_small() -> None:
    waiting = Anticipation(Limits(micro_batches=8, micro_batch_tokens=1024))
    for _ in range(4):
        waiting.passed(512, PASS_S)
    assert waiting.patience(512, [away(10.0, tokens=512)], 10.0) > 0
