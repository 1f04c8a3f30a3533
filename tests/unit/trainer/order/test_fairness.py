"""Who is served how much, and who waits for whom."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from services.trainer.order.scheduler import Cursor, Limits, QueuedOp, plan_next
from tests.unit.trainer.order.queued import ONE_BATCH, drive, forward, forward_only, refs


def test_a_small_tenant_waits_for_one_pass_of_a_big_one() -> None:
    queues = {"big": [forward(1, *[(1, 64)] * 50)], "small": [forward(1, (1, 64))]}
    made = drive(queues, ONE_BATCH, 100)
    assert [refs(d)[0][0][0] for d in made[:4]] == ["big", "small", "big", "big"]
    assert len(made) == 51


def tokens_served(made: list[object], sizes: dict[str, int]) -> dict[str, int]:
    served = dict.fromkeys(sizes, 0)
    for decision in made:
        for model, *_ in (ref for batch in refs(decision) for ref in batch):
            served[model] += sizes[model]
    return served


def test_models_with_work_get_the_same_tokens_whatever_the_size_of_their_units() -> None:
    sizes = {"a": 8, "b": 64, "c": 8}
    queues = {model: [forward(1, *[(1, size)] * 800)] for model, size in sizes.items()}
    made = drive(queues, ONE_BATCH, 45)
    served = tokens_served(made, sizes)
    assert max(served.values()) - min(served.values()) <= 64
    assert served["b"] >= 5 * 64


def test_a_short_request_waits_for_the_pass_that_runs_and_no_other() -> None:
    queues = {model: [forward(1, *[(1, 64)] * 50)] for model in ("a", "b", "c")}
    cursor = Cursor()
    for _ in range(7):
        decision, cursor = plan_next(queues, ONE_BATCH, cursor)
        (((model, _, _),),) = refs(decision)
        queues[model][0].next_unit += 1
    queues["z"] = [forward_only(1, (1, 16))]
    decision, cursor = plan_next(queues, ONE_BATCH, cursor)
    assert refs(decision) == [[("z", 1, 0)]]


def test_a_model_that_asks_for_little_again_and_again_never_waits_for_more_than_the_pass_that_runs() -> None:
    queues = {model: [forward(1, *[(1, 64)] * 50)] for model in ("a", "b", "c")}
    cursor, chosen = Cursor(), []
    for number in range(60):
        if number % 2:
            # It came while the pass before ran.
            queues["z"] = [forward_only(number, (1, 16))]
        decision, cursor = plan_next(queues, ONE_BATCH, cursor)
        (((model, _, _),),) = refs(decision)
        chosen.append(model)
        if model == "z":
            del queues["z"]
        else:
            queues[model][0].next_unit += 1
    assert chosen[1::2] == ["z"] * 30
    assert {model: chosen.count(model) for model in "abc"} == dict.fromkeys("abc", 10)


def test_models_that_come_and_go_with_little_keep_nobody_waiting_for_ever() -> None:
    queues = {"big": [forward(1, *[(1, 64)] * 50)]}
    cursor, turns = Cursor(), []
    for number in range(200):
        queues[f"small-{number}"] = [forward_only(1, (1, 64))]
        decision, cursor = plan_next(queues, ONE_BATCH, cursor)
        (((model, _, _),),) = refs(decision)
        if model == "big":
            queues[model][0].next_unit += 1
            turns.append(number)
        else:
            del queues[model]
    # One in ten or so: among many that have work each has its share.
    assert len(turns) > 3 and len(cursor.served) < 2 * len(queues)


class Work:
    """Queues that are kept filled, and whose decisions are carried out."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.cursor = Cursor()
        self.queues: dict[str, list[QueuedOp]] = {}
        self._numbers = itertools.count(1)

    def fill(self, model: str, operations: int, units: int, tokens: int, forward_only: bool = False) -> None:
        queue = self.queues.setdefault(model, [])
        while len(queue) < operations:
            shapes = [(1, tokens)] * units
            queue.append(replace(forward(next(self._numbers), *shapes), forward_only=forward_only))

    def run(self) -> set[str]:
        """The models of the next pass."""
        decision, self.cursor = plan_next(self.queues, self.limits, self.cursor)
        found = [ref for batch in refs(decision) for ref in batch]
        for model, seq_id, unit in found:
            op = next(op for op in self.queues[model] if op.seq_id == seq_id)
            op.next_unit = max(op.next_unit, unit + 1)
        for queue in self.queues.values():
            queue[:] = [op for op in queue if op.units is None or op.next_unit < len(op.units)]
        return {model for model, _, _ in found}


@pytest.mark.parametrize(
    ("small_at_once", "forward_only", "passes"), [(4, False, 8), (4, False, 200), (20, True, 64)]
)
def test_who_shares_passes_and_takes_little_of_each_keeps_nobody_of_the_other_kind_waiting(
    small_at_once: int, forward_only: bool, passes: int
) -> None:
    work = Work(Limits(2, 4096))
    for number in range(passes + 3):
        if number >= passes:
            work.fill("z", 1, 1, 100, not forward_only)
        work.fill("a", 3, 8, 4096, forward_only)
        work.fill("b", small_at_once, 1, 100, forward_only)
        if "z" in work.run():
            break
    assert number in (passes, passes + 1)


@pytest.mark.parametrize("every", [1, 2])
def test_who_trained_beside_one_that_asks_for_little_owes_nothing_for_it(every: int) -> None:
    work = Work(Limits(2, 4096))
    for number in range(400):
        work.fill("a", 3, 8, 4096)
        if number % every == 0:
            work.fill("b", 1, 1, 100)
        work.run()
    assert work.cursor.of("a") - work.cursor.clock <= 3 * 2 * 4096
    work.fill("c", 1, 10_000, 4096, forward_only=True)
    waited = 0
    while "a" not in work.run():
        waited += 1
        work.fill("a", 3, 8, 4096)
    assert waited <= 3


def test_what_a_model_did_not_get_that_left_is_no_debt_of_those_who_stayed() -> None:
    cursor = Cursor().after(("a", "b"), {"a": 64})
    assert (cursor.of("a"), cursor.of("b"), cursor.of("new")) == (64, 0, 32)
    cursor = cursor.after(("a",), {"a": 64})
    assert cursor.of("new") == cursor.of("a") == 128


def test_those_who_took_of_a_pass_all_that_they_could_are_behind_nobody_and_others_owe_them_nothing() -> None:
    cursor = Cursor().after(("a", "b", "c"), {"a": 900, "b": 100, "c": 500})
    assert {cursor.of(model) for model in ("a", "b", "c", "new")} == {900}


def test_the_clock_is_shared_with_those_who_left_ahead_of_it_until_it_comes_to_them() -> None:
    cursor = Cursor(0.0, {"further": 300, "near": 100}).after(("a",), {"a": 400})
    # All three have the first 300, and two of them what is left.
    assert cursor.of("new") == 150
    assert "near" not in cursor.served


def test_a_backward_pass_counts_as_two_forward_ones() -> None:
    for tokens, first in ((25, "asks"), (35, "trains")):
        queues = {"trains": [forward(1, (1, 10))], "asks": [forward_only(1, (1, tokens))]}
        assert refs(plan_next(queues, ONE_BATCH, Cursor())[0]) == [[(first, 1, 0)]]


def test_a_model_has_been_served_all_units_that_it_has_in_a_pass() -> None:
    _, cursor = plan_next({"a": [forward(1, (1, 8), (1, 32), (1, 24))]}, ONE_BATCH, Cursor())
    assert cursor.of("a") == 3 * (8 + 32 + 24)


def test_a_model_that_was_away_saves_nothing_up() -> None:
    queues = {"a": [forward(1, *[(1, 64)] * 50)], "late": []}
    cursor = Cursor()
    for _ in range(20):
        _, cursor = plan_next(queues, ONE_BATCH, cursor)
        queues["a"][0].next_unit += 1
    queues["late"] = [forward(1, *[(1, 64)] * 50)]
    made = []
    for _ in range(10):
        decision, cursor = plan_next(queues, ONE_BATCH, cursor)
        (((model, _, _),),) = refs(decision)
        queues[model][0].next_unit += 1
        made.append(model)
    assert made.count("late") <= 6
    assert len(cursor.served) <= 2


def test_what_was_served_is_forgotten_when_nobody_has_work() -> None:
    _, cursor = plan_next({"a": [forward(1, (1, 64))]}, ONE_BATCH, Cursor())
    assert cursor.served
    assert plan_next({"a": []}, ONE_BATCH, cursor)[1] == Cursor()
