"""Decisions of the dispatcher, over plain data."""

from __future__ import annotations

import pytest

from services.common.contract import errors
from services.common.contract.errors import (
    Conflict,
    DataLoss,
    DeadlineExceeded,
    Internal,
    InvalidRequest,
    ModelNotResident,
    NotFound,
    Overloaded,
    SnapshotNotFound,
    StaleEpoch,
    StorageAway,
    TinsmithError,
    Unavailable,
)
from services.common.state.journal import UnreadableOperation
from services.common.state.journal_records import Entry, InVain, JournalIndex
from services.gateway.dispatch.plan import (
    IN_VAIN_S,
    LONGEST_PAUSE_S,
    REFUSED_S,
    Action,
    Allowance,
    Gap,
    Position,
    Send,
    Window,
    after_failure,
    backoff,
    can_replay_from_start,
    closing_result,
    ends_model,
    is_refused,
    is_snapshot_missing,
    loses_snapshot,
    may_be_told_first,
    most_between_restores,
    plan,
    position_after_restore,
    position_at,
    replay_passes_over,
    starts_at_creation,
    tried_in_vain,
)
from tinsmith.internal.v1 import operation_pb2
from tinsmith.v1 import results_pb2, types_pb2

WINDOW = Window(operations=4, bytes=100)


def pending(seq_id: int, size: int = 10) -> Entry:
    return Entry(seq_id, size, True)


def published(seq_id: int) -> Entry:
    return Entry(seq_id, 10, False)


def used_up(seq_id: int) -> Entry:
    return Entry(seq_id, 0, False)


def chosen(position: Position, *entries: Entry, floor: int = -1) -> tuple[list[tuple[int, int]], Gap | None]:
    """(seq_id, after_seq_id) of what is sent, and the gap."""
    step = plan(position, entries, floor, 0, 0, WINDOW)
    return [(send.seq_id, send.after_seq_id) for send in step.sends], step.gap


def test_operations_are_sent_in_a_chain() -> None:
    assert chosen(Position(), pending(0), pending(1), pending(2)) == ([(0, -1), (1, 0), (2, 1)], None)


def test_nothing_is_sent_beyond_a_gap() -> None:
    assert chosen(Position(), pending(0), pending(3)) == ([(0, -1)], Gap(1, 2))


def test_a_used_up_seq_id_is_passed_over_and_is_nobodys_predecessor() -> None:
    assert chosen(Position(), pending(0), used_up(1), pending(2)) == ([(0, -1), (2, 0)], None)


def test_a_skipped_gap_no_longer_holds_anything_up() -> None:
    assert chosen(Position(0, -1, 0), pending(3), floor=2) == ([(3, 0)], None)


def test_a_skipped_gap_does_not_skip_what_did_arrive_within_it() -> None:
    assert chosen(Position(0, -1, 0), pending(1), pending(3), floor=2) == ([(1, 0), (3, 1)], None)


def test_what_a_durable_snapshot_covers_is_no_gap() -> None:
    assert chosen(position_after_restore(10, 16), pending(16), floor=15) == ([(16, 10)], None)


def test_after_a_restore_everything_later_is_sent_again_even_if_its_result_is_published() -> None:
    position = position_after_restore(3, 6)
    assert position.cursor == 3
    step = plan(position, [published(4), used_up(5), pending(6)], -1, 0, 0, WINDOW)
    assert step.sends == (Send(4, 3, 10, replayed=True), Send(6, 4, 10, replayed=False))


def test_after_a_restore_an_executed_operation_without_a_result_is_asked_for() -> None:
    position = position_after_restore(3, 2)
    assert position.cursor == 1
    sent, gap = chosen(position, pending(2), published(3), pending(4))
    assert sent == [(2, 1), (4, 3)]
    assert gap is None


def test_what_the_trainer_has_executed_is_no_gap() -> None:
    assert chosen(position_after_restore(5, 2), pending(2), pending(6)) == ([(2, 1), (6, 5)], None)


def test_what_is_sent_again_begins_after_the_operation_that_was_put_off() -> None:
    position = position_at(Position(cursor=7, applied=2, tail=7), 4)
    assert chosen(position, pending(5), pending(6)) == ([(5, 4), (6, 5)], None)
    assert position.cursor == 4


def test_the_window_bounds_operations_and_bytes_but_lets_one_large_operation_through() -> None:
    five = [pending(seq_id) for seq_id in range(5)]
    step = plan(Position(), five, -1, 0, 0, WINDOW)
    assert [send.seq_id for send in step.sends] == [0, 1, 2, 3]
    assert step.position == Position(3, -1, 3)
    assert [send.seq_id for send in plan(step.position, five[4:], -1, 3, 30, WINDOW).sends] == [4]
    large = [pending(0, 60), pending(1, 60)]
    assert [send.seq_id for send in plan(Position(), large, -1, 0, 0, WINDOW).sends] == [0]
    assert [send.seq_id for send in plan(Position(), [pending(0, 1000)], -1, 0, 0, WINDOW).sends] == [0]
    assert plan(Position(), [pending(0, 60)], -1, 1, 60, WINDOW).sends == ()


@pytest.mark.parametrize(
    ("error", "times", "action"),
    [
        (StaleEpoch(""), 1, Action.GIVE_UP_LEASE),
        (ModelNotResident(""), 9, Action.SYNCHRONISE),
        (Unavailable(""), 1, Action.AWAIT_TRAINER),
        (Unavailable(""), 1, Action.AWAIT_TRAINER),
        (Unavailable(""), 1000, Action.AWAIT_TRAINER),
        (DeadlineExceeded(""), 9, Action.RESEND),
        (Overloaded(""), 9, Action.RESEND),
        (StorageAway(""), 9, Action.RESEND),
        (Conflict(""), 2, Action.SYNCHRONISE),
        (Conflict(""), 3, Action.FAIL),
        (Internal("", "result_lost"), 1, Action.REPORT_LOST_RESULT),
        (Internal(""), 1, Action.FAIL),
        (InvalidRequest(""), 1, Action.FAIL),
    ],
)
def test_every_failure_of_a_call_has_its_answer(error: TinsmithError, times: int, action: Action) -> None:
    assert after_failure(error, times) is action


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (DataLoss("damaged"), True),
        (InvalidRequest("of another shape", "state_mismatch"), True),
        (NotFound("checkpoint 7 is gone"), True),
        (NotFound("checkpoint 7 does not exist", "checkpoint_not_found"), True),
        (InvalidRequest("too large for it", "beyond_trainer_memory"), False),
        (Conflict("another trainer's"), False),
        (Internal("died 3 times", "crashed_trainer"), False),
        (Internal("no room", "adapters_in_use"), False),
        (Internal("the disk does not answer"), False),
    ],
)
def test_only_what_is_refused_for_long_ends_a_model_whose_session_lives(
    error: TinsmithError, refused: bool
) -> None:
    at_once, soon, late = InVain(0, 0), InVain(10**6, REFUSED_S - 1), InVain(10**6, REFUSED_S)
    for told in (error, errors.from_pb(errors.to_pb(error))):
        assert is_refused(told) is refused
        assert not ends_model(told, 10**6, at_once, over=True)
        assert not ends_model(told, 10**6, soon, over=False)
        assert ends_model(told, 1, late, over=False) is refused


def test_what_a_replay_loads_may_be_away_for_minutes() -> None:
    waits = [backoff(times, first=0.1, most=LONGEST_PAUSE_S) for times in range(1, 20)]
    tries = next(number for number in range(20) if sum(waits[:number]) >= REFUSED_S)
    assert sum(waits[: tries - 1]) > 5 * 60 and sum(waits[:tries]) < 20 * 60


def test_an_operation_that_cannot_be_read_ends_a_model_that_needs_it() -> None:
    torn, at_once = UnreadableOperation("journal", 1, "torn"), InVain(0, 0)
    assert not ends_model(torn, 2, at_once, over=False)
    assert ends_model(torn, 3, at_once, over=False)


@pytest.mark.parametrize(
    ("error", "missing"),
    [
        (DataLoss("damaged"), True),
        (SnapshotNotFound("none"), True),
        (NotFound("none"), True),
        (Internal("it is on another volume", "other_volume"), False),
        (InvalidRequest("of another shape", "state_mismatch"), False),
        (Overloaded("adapters are in use"), False),
    ],
)
def test_only_a_snapshot_that_is_missing_for_long_ends_a_model_whose_session_lives(
    error: TinsmithError, missing: bool
) -> None:
    assert is_snapshot_missing(error) is missing and tried_in_vain(error)
    assert not loses_snapshot(error, InVain(10**6, REFUSED_S - 1), over=False)
    assert loses_snapshot(error, InVain(10**6, REFUSED_S), over=False) is missing


def test_a_model_whose_session_is_over_is_not_tried_for_ever() -> None:
    error, long, longer = Internal("no room"), InVain(IN_VAIN_S - 1, 0), InVain(IN_VAIN_S, 0)
    assert not ends_model(error, 10**6, long, over=True) and not loses_snapshot(error, long, over=True)
    assert ends_model(error, 1, longer, over=True) and loses_snapshot(error, longer, over=True)
    assert not ends_model(error, 1, longer, over=False) and not loses_snapshot(error, longer, over=False)


@pytest.mark.parametrize("error", [Unavailable("it drains"), DeadlineExceeded("it hangs")])
def test_a_trainer_that_is_away_has_not_tried(error: TinsmithError) -> None:
    assert not tried_in_vain(error)


def test_only_what_changed_the_model_is_replayed() -> None:
    fine, failed = results_pb2.OperationResult(), results_pb2.OperationResult()
    fine.optim_step.SetInParent()
    failed.error.code = "oom"
    train, score = operation_pb2.Operation(), operation_pb2.Operation()
    train.forward_backward.SetInParent()
    score.forward_backward.forward_only = True
    load = operation_pb2.Operation()
    load.load_state.SetInParent()
    assert not replay_passes_over(train, fine)
    assert not replay_passes_over(load, fine)
    assert replay_passes_over(score, fine)
    for kind in ("save_state", "save_for_sampler", "save_external"):
        save = operation_pb2.Operation()
        getattr(save, kind).SetInParent()
        assert replay_passes_over(save, fine)
    assert replay_passes_over(train, failed)


def test_only_what_ran_forward_may_be_told_before_it_is_written() -> None:
    batch, scored, failed = (
        operation_pb2.Operation(),
        results_pb2.OperationResult(),
        results_pb2.OperationResult(),
    )
    scored.forward_backward.SetInParent()
    failed.error.code = "out_of_memory"
    batch.forward_backward.forward_only = True
    assert may_be_told_first(batch, scored)
    assert not may_be_told_first(batch, failed)
    batch.forward_backward.forward_only = False
    assert not may_be_told_first(batch, scored)
    step, stepped = operation_pb2.Operation(), results_pb2.OperationResult()
    step.optim_step.SetInParent()
    stepped.optim_step.SetInParent()
    assert not may_be_told_first(step, stepped)


def test_a_replay_repeats_a_step_that_failed_and_dropped_the_gradient() -> None:
    step, dropped = operation_pb2.Operation(), results_pb2.OperationResult()
    step.optim_step.SetInParent()
    dropped.error.code = "non_finite_gradient"
    assert not replay_passes_over(step, dropped)
    dropped.error.code = "internal"
    assert replay_passes_over(step, dropped)


def test_a_model_closes_when_its_creation_fails_or_it_is_unloaded() -> None:
    fine, failed = results_pb2.OperationResult(), results_pb2.OperationResult()
    fine.unload_model.SetInParent()
    failed.error.message = "no memory"
    creation, unload = operation_pb2.Operation(), operation_pb2.Operation()
    creation.create_model.SetInParent()
    unload.unload_model.SetInParent()
    closing = results_pb2.OperationResult.FromString(closing_result(creation, failed))
    assert closing.error.category == types_pb2.ERROR_CATEGORY_USER
    assert "no memory" in closing.error.message
    unloaded = results_pb2.OperationResult.FromString(closing_result(unload, fine))
    assert unloaded.error.code == "model_unloaded"
    assert closing_result(creation, fine) == b""
    assert closing_result(unload, failed) == b""


def test_a_model_without_a_snapshot_can_be_replayed_only_from_its_creation() -> None:
    def index(durable: int, *entries: Entry) -> JournalIndex:
        return JournalIndex(durable, -1, b"", "org/base", "", 0, 1, 0, entries)

    assert starts_at_creation(index(-1, pending(0), pending(1)))
    assert not starts_at_creation(index(-1, published(0), pending(1)))
    assert not starts_at_creation(index(0, pending(0)))
    assert can_replay_from_start(index(-1, published(0), pending(1)))
    assert not can_replay_from_start(index(3, pending(4)))
    assert not can_replay_from_start(index(-1, pending(1)))
    assert not can_replay_from_start(index(-1))


def test_waits_grow_up_to_a_bound() -> None:
    waits = [backoff(attempt, first=0.1, most=1.0) for attempt in range(1, 5000)]
    assert waits[:3] == [0.1, 0.2, 0.4]
    assert waits == sorted(waits)
    assert waits[-1] == 1.0


@pytest.mark.parametrize(
    ("allowance", "sent", "held_back"),
    [
        (Allowance(25, False), [0, 1], True),
        (Allowance(30, False), [0, 1, 2], False),
        (Allowance(0, True), [0], True),
        (Allowance(0, False), [], True),
    ],
)
def test_no_more_is_sent_than_there_is_memory_for(
    allowance: Allowance, sent: list[int], held_back: bool
) -> None:
    step = plan(Position(), [pending(n) for n in range(3)], -1, 0, 0, WINDOW, allowance)
    assert [send.seq_id for send in step.sends] == sent
    assert (step.held_back, step.nbytes) == (held_back, 10 * len(sent))
    assert step.position.cursor == len(sent) - 1


def test_a_trainer_is_asked_less_and_less_often_for_what_it_refuses_and_soon_for_what_passes() -> None:
    assert most_between_restores(InvalidRequest("no such layer")) == LONGEST_PAUSE_S
    assert most_between_restores(DataLoss("damaged")) == LONGEST_PAUSE_S
    assert most_between_restores(Overloaded("adapters are in use")) == 2.0
