"""The scheduler's decisions, from plain data."""

from __future__ import annotations

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
from tests.unit.trainer.order.queued import (
    ONE_BATCH,
    TWO_BATCHES,
    control,
    drive,
    forward,
    forward_only,
    refs,
)


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


def test_ranks_have_equally_many_batches_of_a_pass_while_more_follow() -> None:
    queues = {"a": [forward(1, *[(1, 40)] * 7)]}
    assert [len(refs(made)) for made in drive(queues, TWO_BATCHES, 20)] == [2, 2, 3]


def test_a_unit_that_found_room_in_an_earlier_batch_stays_behind_those_before_it() -> None:
    queues = {"a": [forward(1, (1, 60), (1, 24), (1, 20))], "b": [forward(1, (1, 44), (1, 44))]}
    decision, _ = plan_next(queues, TWO_BATCHES, Cursor())
    assert refs(decision) == [[("b", 1, 0), ("a", 1, 2)], [("a", 1, 0)], [("a", 1, 1)]]


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


def test_models_that_are_cut_alike_leave_every_rank_the_same_to_do() -> None:
    queues = {model: [forward(1, (1, 21), (1, 21))] for model in "abc"}
    decision, _ = plan_next(queues, Limits(3, 64), Cursor())
    assert [len(batch) for batch in refs(decision)] == [2, 2, 2]


def test_forward_only_work_and_training_never_share_a_pass() -> None:
    queues = {"a": [forward(1, (1, 16))], "b": [forward_only(1, (1, 16))], "c": [forward_only(1, (1, 16))]}
    made = drive(queues, TWO_BATCHES, 10)
    assert [refs(decision) for decision in made] == [[[("b", 1, 0)], [("c", 1, 0)]], [[("a", 1, 0)]]]


def test_all_waiting_control_operations_run_before_the_next_pass() -> None:
    queues = {"a": [control(1), forward(2, (1, 8))], "b": [control(1), forward(2, (1, 8))]}
    made = drive(queues, ONE_BATCH, 10)
    assert made[:2] == [NextControlOp("a", 1), NextControlOp("b", 1)]
    assert refs(made[2]) == [[("a", 2, 0), ("b", 2, 0)]]


def test_models_that_only_have_control_operations_take_turns() -> None:
    queues = {model: [control(number) for number in range(1, 4)] for model in "ab"}
    made = drive(queues, ONE_BATCH, 10)
    assert made == [NextControlOp(model, number) for number in range(1, 4) for model in "ab"]


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
    queues["a"][1].suspect = queues["b"][0].suspect = True
    cut = only_suspect(queues)
    assert cut is not None
    assert refs(plan_next(cut, TWO_BATCHES, Cursor())[0]) == [[("b", 4, 0)]]
    del queues["b"][0]
    assert only_suspect(queues) is None, "its turn has not come"
    assert refs(plan_next(queues, TWO_BATCHES, Cursor())[0]) == [[("a", 1, 0)], [("b", 5, 0)]]


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
