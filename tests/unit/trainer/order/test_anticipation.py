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
    assert anticipation().patience(16, others, 10.02) == pytest.approx(10.01 + 3 * 0.04 - 10.02)


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
    assert waiting.patience(16, [gone], 10.061) == 0.0
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
    assert anticipation().patience(16, [habit], 14.0) == pytest.approx(0.06)
    habit.asked(16, 17.0)
    habit.stepped(18.0)
    assert anticipation().patience(16, [habit], 18.0) == 0.0


def test_a_model_is_waited_for_as_long_as_it_took_when_it_came_back_last_of_several() -> None:
    habit = away(10.0, 0.06)
    for number in range(3):
        habit.asked(16, 10.02 + number)
        habit.stepped(11.0 + number)
    assert anticipation().patience(16, [habit], 13.0) == pytest.approx(3 * 0.06)
    habit.asked(16, 13.02)
    habit.stepped(14.0)
    assert anticipation().patience(16, [habit], 14.0) == pytest.approx(3 * 0.02), "that was too long ago"


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


def rest(waiting: Anticipation, now: float, *come: Habit) -> float:
    """Models come 10 ms one after the other to a trainer that rests, and have a pass; a minute after that."""
    for number, habit in enumerate(come):
        waiting.came(habit, 16, now + number * 0.01)
    waiting.begins()
    waiting.ended(now + PASS_S)
    return now + PASS_S + 60.0


def come(waiting: Anticipation, habit: Habit, now: float) -> float:
    """How long a pass waits then for whoever comes after this one."""
    waiting.came(habit, habit.tokens, now)
    return waiting.patience(16, [], now)


def models(count: int, tokens: int = 16) -> list[Habit]:
    """That are known by nothing but what they ask for."""
    return [Habit(tokens) for _ in range(count)]


def test_after_a_rest_a_pass_waits_for_those_who_came_together_as_long_as_one_comes_upon_the_other() -> None:
    waiting, (first, second, third) = anticipation(), models(3)
    now = rest(waiting, 100.0, first, second, third)
    assert come(waiting, second, now) == pytest.approx(0.05)
    assert come(waiting, first, now + 0.02) == pytest.approx(0.05)
    assert waiting.patience(32, [], now + 0.071) == 0.0
    waiting.begins()
    waiting.ended(now + PASS_S)
    now += 60.0
    assert come(waiting, third, now) > 0
    assert come(waiting, second, now + 0.01) > 0
    assert come(waiting, first, now + 0.02) == 0.0, "nobody is missing"


def test_it_waits_half_of_a_small_pass_at_most_whoever_comes() -> None:
    waiting, habits = anticipation(), models(7)
    now = rest(waiting, 100.0, *habits)
    waits = [come(waiting, habit, now + number * 0.04) for number, habit in enumerate(habits[:6])]
    assert waits == [pytest.approx(wait) for wait in (0.05, 0.05, 0.05, 0.05, 0.04, 0.0)]


def test_who_comes_alone_after_one_rest_upon_the_other_waits_for_nobody() -> None:
    waiting, (lone, other) = anticipation(), models(2)
    now = rest(waiting, 100.0, lone, other)
    waits = []
    for _ in range(6):
        waits.append(come(waiting, lone, now))
        now = rest(waiting, now)
    assert waits == [pytest.approx(0.05)] * 3 + [0.0] * 3


def test_nobody_is_waited_for_who_did_not_come_with_one_of_those_that_have_come() -> None:
    waiting, (first, second, apart) = anticipation(), models(3)
    now = rest(waiting, 100.0, first, second)
    now = rest(waiting, now, apart)
    assert come(waiting, apart, now) == 0.0
    waiting.begins()
    waiting.ended(now + PASS_S)
    now += 60.0
    assert come(waiting, first, now) > 0
    assert come(waiting, second, now + 0.01) == 0.0


def test_a_model_that_asks_twice_does_not_come_together_with_itself() -> None:
    waiting, (lone,) = anticipation(), models(1)
    assert come(waiting, lone, rest(waiting, 100.0, lone, lone)) == 0.0


def test_a_trainer_that_is_busy_waits_for_nobody_who_might_come() -> None:
    waiting, (lone, other) = anticipation(), models(2)
    ended = rest(waiting, 100.0, lone, other) - 60.0
    assert come(waiting, lone, ended + 0.1) == 0.0


def test_after_a_rest_only_batches_that_fit_in_one_small_pass_come_together() -> None:
    waiting, (lone, larger), (large,) = anticipation(), models(2), models(1, tokens=1024)
    for number, habit in enumerate((lone, larger, large)):
        waiting.came(habit, habit.tokens, 100.0 + number * 0.01)
    waiting.begins()
    waiting.ended(101.0)
    larger.tokens = 120
    assert come(waiting, lone, 160.0) == 0.0
    assert waiting.patience(8, [], 160.0) > 0.0
