"""What runs while weights are replaced, or after that went wrong, and how long unused weights stay."""

from __future__ import annotations

from services.sampler.engine.snapshot_key import SnapshotKey
from services.sampler.snapshots.turns import IDLE_GRACE_S, SHORTEST_TURN_S, Run, Swap, Turns, Update, Wait

BASE = None
A, B = (SnapshotKey("session:train:0", version) for version in (1, 2))


def with_weights(now: float = 100.0, seconds: float = 1.0) -> Turns:
    """A has come into the engine now, in a swap of so long, and request 1 runs on it."""
    turns = Turns(0.0)
    turns.arrive(1, A)
    assert turns.decide(now) == Swap(A)
    turns.swapped(now, seconds)
    assert turns.decide(now) == Run((1,))
    return turns


def test_while_weights_are_replaced_nothing_enters_on_those_that_were_there() -> None:
    turns = with_weights()
    turns.leave(1, 100.0)
    turns.arrive(2, B)
    now = 100.0 + IDLE_GRACE_S
    assert turns.decide(now) == Swap(B), "before the turn of A is over, as nobody uses it"
    assert not turns.is_open(A, now) and not turns.enter(3, A, now)
    turns.arrive(3, A)
    assert turns.decide(now) == Wait()


def test_weights_stay_for_a_moment_after_they_were_last_used() -> None:
    turns = with_weights()
    turns.arrive(2, B)
    turns.leave(1, 101.0)
    assert turns.decide(101.0) == Wait(101.0 + IDLE_GRACE_S)
    assert turns.decide(101.0 + IDLE_GRACE_S) == Swap(B)


def test_weights_that_came_for_one_who_has_left_stay_for_a_moment() -> None:
    turns = Turns(0.0)
    turns.arrive(1, A)
    turns.arrive(2, B)
    assert turns.decide(50.0) == Swap(A)
    turns.leave(1, 90.0)
    turns.swapped(100.0, 1.0)
    assert turns.decide(100.0) == Wait(100.0 + IDLE_GRACE_S)


def test_a_turn_is_not_so_short_as_a_short_swap() -> None:
    turns = with_weights(seconds=0.001)
    turns.arrive(2, B)
    assert turns.is_open(A, 100.0 + SHORTEST_TURN_S - 0.01)
    assert not turns.is_open(A, 100.0 + SHORTEST_TURN_S)


def test_one_that_left_while_it_waited_for_newer_weights_closes_nothing() -> None:
    turns = with_weights()
    turns.change(1, B)
    turns.leave(1, 100.0)
    turns.arrive(2, A)
    assert turns.decide(200.0) == Run((2,))
    assert turns.decide(200.0) == Wait()


def test_weights_that_are_half_replaced_are_not_in_the_engine() -> None:
    turns = with_weights()
    turns.change(1, B)
    assert turns.decide(100.0) == Update(B)
    turns.broke()
    assert turns.resident is BASE
    turns.leave(1, 100.0)
    assert turns.undecided and turns.decide(100.0) == Swap(BASE), "nobody has to ask for them"


def test_in_an_engine_whose_replacement_was_given_up_nothing_runs_and_nobody_waits() -> None:
    turns = with_weights()
    turns.change(1, B)
    turns.arrive(2, B)
    turns.arrive(3, BASE)
    assert turns.decide(100.0) == Update(B)
    assert turns.gave_up() == ((2,), (1,), (3,))
    assert (turns.lost, turns.waiting, turns.resident) == (True, 0, BASE)
    for weights in (A, B, BASE):
        assert not turns.enter(4, weights, 101.0)
    turns.arrive(4, A)
    assert turns.decide(200.0) == Wait()
