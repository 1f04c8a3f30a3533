"""The scheduler's decisions, from plain data."""

from __future__ import annotations

import itertools
from collections.abc import Set
from dataclasses import replace

import pytest

from services.trainer.order.microbatch import Unit
from services.trainer.order.scheduler import (
    Cursor,
    Limits,
    NextControlOp,
    NextPass,
    QueuedOp,
    UnitRef,
    only_suspect,
    plan_next,
)

ONE_BATCH = Limits(micro_batches=1, micro_batch_tokens=64)
TWO_BATCHES = Limits(micro_batches=2, micro_batch_tokens=64)


def forward(seq_id: int, *shapes: tuple[int, int]) -> QueuedOp:
    """An operation with one unit per (datums, tokens of each)."""
    units = tuple(Unit(tuple(range(datums)), datums * length) for datums, length in shapes)
    return QueuedOp(seq_id, units)


def control(seq_id: int) -> QueuedOp:
    return QueuedOp(seq_id, None)


def refs(decision: object) -> list[list[tuple[str, int, int]]]:
    assert isinstance(decision, NextPass)
    return [[(r.model_id, r.seq_id, r.unit) for r in batch] for batch in decision.micro_batches]


def drive(
    queues: dict[str, list[QueuedOp]], limits: Limits, steps: int, alone: Set[str] = frozenset()
) -> list[object]:
    """Applies decisions as the executor does and returns them."""
    cursor, made = Cursor(), []
    for _ in range(steps):
        decision, cursor = plan_next(queues, limits, cursor, alone)
        if decision is None:
            break
        made.append(decision)
        if isinstance(decision, NextControlOp):
            assert queues[decision.model_id].pop(0).seq_id == decision.seq_id
            continue
        for ref in (ref for batch in decision.micro_batches for ref in batch):
            op = next(op for op in queues[ref.model_id] if op.seq_id == ref.seq_id)
            assert op.next_unit == ref.unit
            op.next_unit += 1
        for queue in queues.values():
            while queue and queue[0].units is not None and queue[0].next_unit == len(queue[0].units):
                queue.pop(0)
    return made


def test_nothing_queued_gives_no_decision() -> None:
    assert plan_next({"a": []}, ONE_BATCH, Cursor())[0] is None


def test_units_of_one_model_never_share_a_batch() -> None:
    decision, _ = plan_next({"a": [forward(1, (1, 8), (1, 8), (1, 8))]}, TWO_BATCHES, Cursor())
    assert refs(decision) == [[("a", 1, 0)], [("a", 1, 1)], [("a", 1, 2)]]


def test_units_of_several_training_operations_of_a_model_are_one_for_each_rank() -> None:
    queues = {"a": [forward(number, (1, 8)) for number in range(1, 6)]}
    made = [refs(decision) for decision in drive(queues, TWO_BATCHES, 10)]
    assert made == [[[("a", 1, 0)], [("a", 2, 0)]], [[("a", 3, 0)], [("a", 4, 0)]], [[("a", 5, 0)]]]
    queues = {"a": [forward(1, *[(1, 8)] * 3), forward(2, *[(1, 8)] * 3)]}
    made = [refs(decision) for decision in drive(queues, TWO_BATCHES, 10)]
    assert [{seq_id for ((_, seq_id, _),) in batches} for batches in made] == [{1}, {2}]


def test_a_model_that_only_runs_forward_has_many_operations_in_a_pass() -> None:
    decision, _ = plan_next({"a": [forward_only(n, (1, 8)) for n in range(1, 20)]}, ONE_BATCH, Cursor())
    assert len(refs(decision)) == 8


def test_a_pass_has_as_many_small_batches_as_make_up_full_ones() -> None:
    queues = {"a": [forward(1, *[(1, 16)] * 19)]}
    assert [len(refs(made)) for made in drive(queues, ONE_BATCH, 20)] == [4, 4, 4, 4, 3]
    queues = {"a": [forward(1, *[(1, 40)] * 7)]}
    assert [len(refs(made)) for made in drive(queues, TWO_BATCHES, 20)] == [3, 3, 1]


def test_small_models_are_spread_over_the_ranks() -> None:
    queues = {name: [forward(1, (1, 8))] for name in "abcd"}
    made = drive(queues, TWO_BATCHES, 1)
    assert refs(made[0]) == [[("a", 1, 0), ("c", 1, 0)], [("b", 1, 0), ("d", 1, 0)]]


def test_units_of_different_models_share_a_batch_when_they_fit() -> None:
    queues = {"a": [forward(1, (2, 16))], "b": [forward(7, (2, 10))]}
    decision, _ = plan_next(queues, ONE_BATCH, Cursor())
    assert refs(decision) == [[("b", 7, 0), ("a", 1, 0)]], "the shorter one first"


def test_units_share_a_batch_up_to_its_tokens_whatever_their_lengths() -> None:
    queues = {"a": [forward(1, (3, 8))], "b": [forward(1, (1, 40))]}
    decision, _ = plan_next(queues, ONE_BATCH, Cursor())
    assert refs(decision) == [[("a", 1, 0), ("b", 1, 0)]]
    queues["b"] = [forward(1, (1, 41))]
    decision, _ = plan_next(queues, ONE_BATCH, Cursor())
    assert refs(decision) == [[("a", 1, 0)]]


def test_a_unit_above_the_budget_still_runs_by_itself() -> None:
    decision, _ = plan_next({"a": [forward(1, (1, 1000))]}, ONE_BATCH, Cursor())
    assert refs(decision) == [[("a", 1, 0)]]


def test_nothing_passes_a_control_operation() -> None:
    queues = {"a": [forward(1, (1, 8)), control(2), forward(3, (1, 8))]}
    made = drive(queues, TWO_BATCHES, 10)
    assert refs(made[0]) == [[("a", 1, 0)]]
    assert made[1] == NextControlOp("a", 2)
    assert refs(made[2]) == [[("a", 3, 0)]]


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


def forward_only(seq_id: int, *shapes: tuple[int, int]) -> QueuedOp:
    return replace(forward(seq_id, *shapes), forward_only=True)


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


def test_who_trained_beside_one_that_comes_and_goes_owes_nothing_for_it() -> None:
    work = Work(Limits(2, 4096))
    for number in range(400):
        work.fill("a", 3, 8, 4096)
        if number % 2:
            work.fill("b", 1, 1, 100)
        work.run()
    assert work.cursor.of("a") - work.cursor.clock <= 3 * 2 * 4096
    work.fill("c", 1, 10_000, 4096, forward_only=True)
    waited = 0
    while "a" not in work.run():
        waited += 1
        work.fill("a", 3, 8, 4096)
    assert waited <= 3


def test_forward_only_work_and_training_never_share_a_pass() -> None:
    queues = {"a": [forward(1, (1, 16))], "b": [forward_only(1, (1, 16))], "c": [forward_only(1, (1, 16))]}
    made = drive(queues, TWO_BATCHES, 10)
    assert [refs(decision) for decision in made] == [[[("b", 1, 0)], [("c", 1, 0)]], [[("a", 1, 0)]]]


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


def test_all_waiting_control_operations_run_before_the_next_pass() -> None:
    queues = {"a": [control(1), forward(2, (1, 8))], "b": [control(1), forward(2, (1, 8))]}
    made = drive(queues, ONE_BATCH, 10)
    assert made[:2] == [NextControlOp("a", 1), NextControlOp("b", 1)]
    assert refs(made[2]) == [[("a", 2, 0), ("b", 2, 0)]]


def test_a_stream_of_control_operations_does_not_starve_passes() -> None:
    queues = {"a": [control(n) for n in range(1, 9)], "b": [forward(n, (1, 64)) for n in range(1, 5)]}
    made = drive(queues, ONE_BATCH, 20)
    kinds = [type(d).__name__ for d in made[:8]]
    assert kinds == ["NextControlOp", "NextPass"] * 4
    assert len(made) == 12


def test_a_lone_model_gets_the_same_batches_however_its_operations_arrive() -> None:
    def ops() -> list[QueuedOp]:
        return [forward(1, (2, 8), (1, 8)), forward(2, (1, 16)), forward(3, (1, 8), (1, 8))]

    together = [batch for d in drive({"a": ops()}, TWO_BATCHES, 20) for batch in refs(d)]
    one_by_one = [batch for op in ops() for d in drive({"a": [op]}, TWO_BATCHES, 20) for batch in refs(d)]
    assert together == one_by_one


def test_the_plan_changes_no_queue() -> None:
    op = forward(1, (1, 8))
    decision, _ = plan_next({"a": [op]}, ONE_BATCH, Cursor())
    assert decision == NextPass(((UnitRef("a", 1, 0),),))
    assert op.next_unit == 0


def test_an_operation_that_may_bring_the_trainer_down_is_planned_without_any_other() -> None:
    queues = {"a": [forward(1, (1, 8)), forward(2, (1, 8))], "b": [forward(4, (1, 8)), forward(5, (1, 8))]}
    cut = only_suspect(queues, lambda model, seq_id: (model, seq_id) in {("b", 4), ("a", 2)})
    assert cut is not None
    assert refs(plan_next(cut, TWO_BATCHES, Cursor())[0]) == [[("b", 4, 0)]]
    assert only_suspect(queues, lambda model, seq_id: seq_id == 2) is None, "its turn has not come"


def test_a_model_with_weights_of_its_own_has_its_passes_for_itself() -> None:
    queues = {"full": [forward(1, (1, 4), (1, 4))], "a": [forward(1, (1, 4))], "b": [forward(1, (1, 4))]}
    decision, cursor = plan_next(queues, TWO_BATCHES, Cursor(), {"full"})
    assert refs(decision) == [[("a", 1, 0)], [("b", 1, 0)]]
    decision, cursor = plan_next(queues, TWO_BATCHES, cursor, {"full"})
    assert refs(decision) == [[("full", 1, 0)], [("full", 1, 1)]]


def test_a_pass_of_a_model_with_its_own_weights_has_units_of_one_operation() -> None:
    queues = {"full": [forward(1, (1, 4), (1, 4), (1, 4)), forward(2, (1, 4)), control(3)]}
    made = drive(queues, TWO_BATCHES, 10, alone={"full"})
    passes = [refs(decision) for decision in made[:3]]
    assert passes == [[[("full", 1, 0)], [("full", 1, 1)]], [[("full", 1, 2)]], [[("full", 2, 0)]]]
    assert made[3] == NextControlOp("full", 3)


def test_models_that_share_passes_and_one_that_does_not_take_turns() -> None:
    queues = {name: [forward(1, *[(1, 4)] * 3)] for name in ("a", "full", "z")}
    made = drive(queues, ONE_BATCH, 20, alone={"full"})
    sharing = [{model for batch in refs(decision) for model, _, _ in batch} for decision in made]
    assert {"a", "z"} in sharing and {"full"} in sharing
    assert all("full" not in models or models == {"full"} for models in sharing)
    assert sharing[:2] == [{"a", "z"}, {"full"}]


def long(seq_id: int, *tokens: int, then: int = 0) -> QueuedOp:
    """An operation with sequences of all ranks, and so many units of one rank each."""
    units = [Unit((index,), length, split=True) for index, length in enumerate(tokens)]
    units += [Unit((len(tokens) + index,), 8) for index in range(then)]
    return QueuedOp(seq_id, tuple(units))


def test_a_sequence_of_all_ranks_has_a_pass_for_itself() -> None:
    queues = {"a": [long(1, 500, 400, then=2)], "b": [forward(1, (1, 8))]}
    made = [refs(decision) for decision in drive(queues, TWO_BATCHES, 20)]
    assert made[0] == [[("b", 1, 0)]]
    assert made[1:] == [[[("a", 1, 0)]], [[("a", 1, 1)]], [[("a", 1, 2)], [("a", 1, 3)]]]


def test_nothing_of_a_model_overtakes_its_sequence_of_all_ranks() -> None:
    queues = {"a": [forward(1, (1, 8)), long(2, 500), forward(3, (1, 8))]}
    made = [refs(decision) for decision in drive(queues, TWO_BATCHES, 20)]
    assert made == [[[("a", 1, 0)]], [[("a", 2, 0)]], [[("a", 3, 0)]]]


def test_a_sequence_of_all_ranks_of_a_model_with_its_own_weights_has_a_pass_for_itself() -> None:
    queues = {"full": [long(1, 500, then=3)]}
    made = [refs(decision) for decision in drive(queues, TWO_BATCHES, 20, alone={"full"})]
    assert made == [[[("full", 1, 0)]], [[("full", 1, 1)], [("full", 1, 2)]], [[("full", 1, 3)]]]


def test_a_sequence_of_all_ranks_counts_with_all_its_tokens() -> None:
    queues = {"a": [long(1, 100, 100, 100)], "b": [forward(n, (1, 60)) for n in range(1, 4)]}
    made = [refs(decision) for decision in drive(queues, ONE_BATCH, 20)]
    models = [batch[0][0] for (batch,) in made]
    assert models == ["b", "a", "b", "b", "a", "a"]
