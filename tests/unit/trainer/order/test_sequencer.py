"""Order, duplicates and fencing of one model's operations."""

from __future__ import annotations

import pytest

from services.common.contract.errors import (
    Internal,
    InvalidRequest,
    ModelNotResident,
    Overloaded,
    StaleEpoch,
)
from services.trainer.order.sequencer import (
    KEPT_BYTES,
    KEPT_RESULTS,
    MAX_WAITING,
    Executed,
    Running,
    Sequence,
)


def admit(sequence: Sequence[str, str], seq_id: int, after: int) -> None:
    assert sequence.find(seq_id, after) is None
    sequence.admit(seq_id, after, f"op{seq_id}")


def run_head(sequence: Sequence[str, str]) -> str:
    operation = sequence.ready[0]
    seq_id = int(operation.removeprefix("op"))
    sequence.executed(seq_id)
    sequence.finish(seq_id, f"result{seq_id}")
    return operation


def test_operations_become_ready_in_order_whatever_order_they_arrive_in() -> None:
    sequence: Sequence[str, str] = Sequence()
    for seq_id in (2, 1, 3, 0):
        admit(sequence, seq_id, seq_id - 1)
    assert list(sequence.ready) == ["op0", "op1", "op2", "op3"]


def test_a_refused_seq_id_leaves_no_gap() -> None:
    sequence: Sequence[str, str] = Sequence(applied=4)
    admit(sequence, 7, 4)
    admit(sequence, 8, 7)
    assert list(sequence.ready) == ["op7", "op8"]


def test_a_duplicate_of_a_waiting_operation_attaches_to_it() -> None:
    sequence: Sequence[str, str] = Sequence()
    admit(sequence, 1, 0)
    assert sequence.find(1, 0) == Running("op1")
    admit(sequence, 0, -1)
    assert sequence.find(1, 0) == Running("op1")


def test_a_duplicate_of_an_executed_operation_gets_its_result() -> None:
    sequence: Sequence[str, str] = Sequence()
    admit(sequence, 0, -1)
    assert run_head(sequence) == "op0"
    assert sequence.find(0, -1) == Executed("result0")
    assert sequence.applied == 0
    assert not sequence.ready


def test_an_executed_operation_whose_result_comes_later_is_still_running() -> None:
    sequence: Sequence[str, str] = Sequence()
    admit(sequence, 0, -1)
    sequence.executed(0)
    assert sequence.find(0, -1) == Running("op0")
    assert sequence.applied == 0


def test_only_the_last_results_are_kept() -> None:
    sequence: Sequence[str, str] = Sequence()
    for seq_id in range(KEPT_RESULTS + 1):
        admit(sequence, seq_id, seq_id - 1)
        run_head(sequence)
    assert sequence.find(1, 0) == Executed("result1")
    with pytest.raises(Internal) as caught:
        sequence.find(0, -1)
    assert caught.value.code == "result_lost"


def test_kept_results_are_bounded_in_bytes_and_the_last_one_is_always_there() -> None:
    sequence: Sequence[str, str] = Sequence(size_of=lambda result: KEPT_BYTES // 3)
    for seq_id in range(10):
        admit(sequence, seq_id, seq_id - 1)
        run_head(sequence)
    assert list(sequence.results) == [7, 8, 9]
    huge: Sequence[str, str] = Sequence(applied=4, size_of=lambda result: 2 * KEPT_BYTES)
    huge.restore_results({3: "result3", 4: "result4"})
    assert list(huge.results) == [4]


def test_a_restored_model_goes_on_after_its_snapshot() -> None:
    sequence: Sequence[str, str] = Sequence(applied=5)
    sequence.restore_results({4: "result4", 5: "result5"})
    assert sequence.find(5, 4) == Executed("result5")
    admit(sequence, 6, 5)
    assert list(sequence.ready) == ["op6"]


def test_what_a_restored_model_has_executed_is_not_executed_again_where_its_result_is_lost() -> None:
    sequence: Sequence[str, str] = Sequence(applied=5)
    for seq_id in (5, 4):
        with pytest.raises(Internal, match="no longer kept"):
            sequence.find(seq_id, seq_id - 1)


def test_a_caller_that_knows_less_than_the_model_is_served() -> None:
    sequence: Sequence[str, str] = Sequence()
    for seq_id in range(3):
        admit(sequence, seq_id, seq_id - 1)
        run_head(sequence)
    # The caller left operation 2 out: a replay may pass over it.
    admit(sequence, 3, 1)
    assert list(sequence.ready) == ["op3"]


def test_a_restored_model_passes_over_what_the_caller_leaves_out() -> None:
    sequence: Sequence[str, str] = Sequence(applied=1)
    admit(sequence, 4, 3)
    admit(sequence, 3, 1)
    assert list(sequence.ready) == ["op3", "op4"]


def test_an_operation_cannot_follow_a_later_one() -> None:
    sequence: Sequence[str, str] = Sequence()
    with pytest.raises(InvalidRequest):
        sequence.find(2, 2)


def test_a_lower_epoch_is_refused_and_a_higher_one_taken() -> None:
    sequence: Sequence[str, str] = Sequence()
    sequence.fence(3)
    sequence.fence(3)
    sequence.fence(4)
    with pytest.raises(StaleEpoch):
        sequence.fence(3)


def test_a_full_queue_refuses_but_early_arrivals_never_block_the_next_in_order() -> None:
    sequence: Sequence[str, str] = Sequence()
    for seq_id in range(1, MAX_WAITING + 1):
        admit(sequence, seq_id, seq_id - 1)
    with pytest.raises(Overloaded):
        sequence.find(1000, 999)
    admit(sequence, 0, -1)
    assert len(sequence.ready) == MAX_WAITING + 1
    with pytest.raises(Overloaded):
        sequence.find(MAX_WAITING + 1, MAX_WAITING)


@pytest.mark.parametrize("ran", [True, False])
def test_another_operation_under_a_number_gets_nothing_of_the_first_one(ran: bool) -> None:
    sequence: Sequence[str, str] = Sequence()
    sequence.admit(0, -1, "op0", accepted_at=1.5)
    if ran:
        run_head(sequence)
    assert sequence.find(0, -1, accepted_at=1.5) is not None
    assert not sequence.strayed
    with pytest.raises(ModelNotResident):
        sequence.find(0, -1, accepted_at=2.5)
    # Nor does what follows go on with it.
    with pytest.raises(ModelNotResident):
        sequence.find(1, 0, accepted_at=3.5)
    assert sequence.strayed


def test_when_operations_were_accepted_is_forgotten_with_their_results() -> None:
    sequence: Sequence[str, str] = Sequence()
    for seq_id in range(KEPT_RESULTS + 10):
        sequence.admit(seq_id, seq_id - 1, f"op{seq_id}", accepted_at=1.0 + seq_id)
        run_head(sequence)
    assert len(sequence._accepted_at) == KEPT_RESULTS
