"""Whose weights are in the engine, and when they change."""

from __future__ import annotations

from services.sampler.engine.snapshot_key import SnapshotKey, Weights
from services.sampler.snapshots.turns import (
    IDLE_GRACE_S,
    SHORTEST_TURN_S,
    TURN_PER_SWAP,
    Run,
    Swap,
    Turns,
    Update,
    Wait,
)

BASE = None
A, B, C = (SnapshotKey("session:train:0", version) for version in (1, 2, 3))
OTHER = SnapshotKey("session:train:1", 1)
SWAP_S = 0.5
TURN_S = max(SHORTEST_TURN_S, TURN_PER_SWAP * SWAP_S)


class Clocked:
    """Turns with a clock of their own; a swap takes SWAP_S."""

    def __init__(self) -> None:
        self.now = 100.0
        self.turns = Turns(self.now)
        self.swaps: list[Weights] = []
        self.updates: list[Weights] = []
        self.running: set[int] = set()
        self.waiting: set[int] = set()
        """For newer weights, while they run."""

    def arrive(self, *requests: tuple[int, Weights]) -> None:
        for ticket, weights in requests:
            self.turns.arrive(ticket, weights)

    def change(self, *requests: tuple[int, SnapshotKey]) -> None:
        for ticket, weights in requests:
            self.turns.change(ticket, weights)
            self.waiting.add(ticket)

    def finish(self, *tickets: int) -> None:
        for ticket in tickets:
            self.running.discard(ticket)
            self.waiting.discard(ticket)
            self.turns.leave(ticket, self.now)

    def settle(self) -> Wait:
        """Does all there is to do now, swaps included."""
        while True:
            decision = self.turns.decide(self.now)
            if isinstance(decision, Run):
                self.running |= set(decision.tickets)
                self.waiting -= set(decision.tickets)
            elif isinstance(decision, Update):
                assert self.running == self.waiting, "updated under a request that is to stay"
                self.updates.append(decision.weights)
                assert self.turns.decide(self.now) == Wait()
                self.now += SWAP_S
                self.turns.updated(self.now, SWAP_S)
            elif isinstance(decision, Swap):
                assert not self.running, "swapped under a running request"
                self.swaps.append(decision.weights)
                assert self.turns.decide(self.now) == Wait()
                self.now += SWAP_S
                self.turns.swapped(self.now, SWAP_S)
            else:
                return decision


def at_home(*requests: tuple[int, Weights]) -> Clocked:
    clocked = Clocked()
    clocked.arrive(*requests)
    clocked.settle()
    return clocked


def test_a_request_enters_at_once_only_where_it_would_not_have_to_wait() -> None:
    clocked = Clocked()
    assert clocked.turns.enter(1, BASE, clocked.now)
    assert not clocked.turns.enter(2, A, clocked.now)
    clocked.arrive((2, A))
    clocked.settle()
    # What waits for its turn goes before it, and what has entered is waited for.
    assert not clocked.turns.enter(3, BASE, clocked.now)
    assert clocked.swaps == []
    clocked.finish(1)
    clocked.now += IDLE_GRACE_S
    clocked.settle()
    assert (clocked.swaps, clocked.running) == ([A], {2})
    assert clocked.turns.enter(4, A, clocked.now)


def test_requests_for_the_weights_in_the_engine_run_at_once() -> None:
    clocked = at_home((1, BASE), (2, BASE))
    assert (clocked.running, clocked.swaps) == ({1, 2}, [])


def test_a_swap_waits_until_the_running_requests_are_done() -> None:
    clocked = at_home((1, BASE), (2, BASE))
    clocked.arrive((3, A))
    clocked.settle()
    clocked.finish(1)
    clocked.settle()
    assert clocked.swaps == []
    clocked.now += IDLE_GRACE_S
    clocked.finish(2)
    clocked.settle()
    assert (clocked.swaps, clocked.running) == ([A], {3})


def test_all_that_wait_for_the_new_weights_run_together() -> None:
    clocked = at_home((1, A), (2, B), (3, A))
    assert (clocked.swaps, clocked.running) == ([A], {1, 3})


def test_weights_that_are_used_all_the_time_give_way_after_their_turn() -> None:
    clocked = at_home((1, A))
    clocked.arrive((2, B))
    clocked.now += TURN_S - 0.1
    clocked.arrive((3, A))
    clocked.settle()
    assert clocked.running == {1, 3}
    clocked.now += 0.2
    clocked.arrive((4, A))
    clocked.settle()
    assert clocked.running == {1, 3}
    clocked.finish(1, 3)
    clocked.settle()
    assert (clocked.swaps, clocked.running) == ([A, B], {2})
    clocked.finish(2)
    clocked.now += IDLE_GRACE_S
    clocked.settle()
    assert (clocked.swaps, clocked.running) == ([A, B, A], {4})


def test_weights_that_nobody_uses_give_way_within_their_turn_but_not_to_a_short_gap() -> None:
    clocked = at_home((1, A))
    clocked.arrive((2, B))
    clocked.finish(1)
    wait = clocked.settle()
    assert wait.until == clocked.now + IDLE_GRACE_S
    clocked.now += IDLE_GRACE_S / 2
    clocked.arrive((3, A))
    clocked.settle()
    assert (clocked.swaps, clocked.running) == ([A], {3})
    clocked.finish(3)
    clocked.now += IDLE_GRACE_S
    clocked.settle()
    assert (clocked.swaps, clocked.running) == ([A, B], {2})


def test_the_longest_waiting_request_decides_what_comes_next() -> None:
    clocked = at_home((1, BASE))
    clocked.arrive((2, B), (3, A), (4, B))
    clocked.finish(1)
    clocked.now += IDLE_GRACE_S
    clocked.settle()
    assert (clocked.swaps, clocked.running) == ([B], {2, 4})


def test_nobody_starves_while_three_busy_clients_come_back_for_ever() -> None:
    clocked = Clocked()
    wanted: list[Weights] = [BASE, A, B]
    waits = dict.fromkeys(range(3), 0.0)
    began = dict.fromkeys(range(3), clocked.now)
    clocked.arrive(*enumerate(wanted))
    for _ in range(1000):
        clocked.settle()
        for ticket in sorted(clocked.running):
            waits[ticket] = max(waits[ticket], clocked.now - began[ticket])
            clocked.now += 0.02
            clocked.finish(ticket)
            clocked.arrive((ticket, wanted[ticket]))
            began[ticket] = clocked.now
        clocked.now += 0.001
    most = 3 * (TURN_S + SWAP_S + 0.1)
    assert 0 < max(waits.values()) < most
    assert len(clocked.swaps) > 6


def test_a_waiting_request_that_gives_up_asks_for_no_swap() -> None:
    clocked = at_home((1, BASE))
    clocked.arrive((2, A))
    clocked.settle()
    clocked.finish(2)
    clocked.arrive((3, BASE))
    clocked.finish(1)
    clocked.settle()
    assert (clocked.swaps, clocked.running, clocked.turns.waiting) == ([], {3}, 0)


def test_only_weights_whose_requests_would_run_at_once_are_open() -> None:
    clocked = at_home((1, A))
    assert clocked.turns.is_open(A, clocked.now) and not clocked.turns.is_open(BASE, clocked.now)
    clocked.arrive((2, B))
    assert clocked.turns.is_open(A, clocked.now)
    clocked.now += TURN_S
    assert not clocked.turns.is_open(A, clocked.now)
    clocked.finish(2)
    assert clocked.turns.is_open(A, clocked.now)


def test_weights_that_are_refused_before_the_swap_leave_those_in_the_engine_where_they_are() -> None:
    clocked = at_home((1, A))
    clocked.finish(1)
    clocked.now += TURN_S
    clocked.arrive((2, B), (3, B))
    assert clocked.turns.decide(clocked.now) == Swap(B)
    assert clocked.turns.refused(clocked.now, 0.1) == (2, 3)
    assert clocked.turns.resident == A
    assert clocked.turns.is_open(A, clocked.now)
    clocked.arrive((4, A))
    clocked.settle()
    assert (clocked.swaps, clocked.running) == ([A], {4})


def test_a_swap_that_breaks_off_has_the_base_weights_put_back_before_anything_runs() -> None:
    turns = Turns(0.0)
    turns.arrive(1, A)
    turns.arrive(2, A)
    turns.arrive(3, B)
    assert turns.decide(10.0) == Swap(A)
    assert turns.broke() == (1, 2)
    # Nobody has to ask for them.
    assert (turns.resident, turns.is_open(BASE, 10.0)) == (BASE, False)
    assert turns.decide(10.0) == Swap(BASE)
    turns.arrive(4, BASE)
    assert turns.decide(11.0) == Wait()
    turns.swapped(12.0, 0.1)
    assert turns.decide(12.0 + IDLE_GRACE_S) == Run((4,))
    assert not turns.lost


def test_an_engine_that_does_not_take_its_base_weights_back_is_lost_and_runs_nothing() -> None:
    turns = Turns(0.0)
    turns.arrive(1, A)
    assert turns.decide(10.0) == Swap(A)
    turns.broke()
    assert turns.decide(10.0) == Swap(BASE)
    turns.arrive(2, BASE)
    turns.arrive(3, B)
    assert turns.broke() == (2, 3)
    assert turns.lost
    turns.arrive(4, BASE)
    assert turns.decide(20.0) == Wait()


def test_base_weights_that_break_off_once_are_tried_again() -> None:
    clocked = at_home((1, A))
    clocked.finish(1)
    clocked.now += TURN_S
    clocked.arrive((2, BASE))
    assert clocked.turns.decide(clocked.now) == Swap(BASE)
    assert clocked.turns.broke() == (2,)
    assert not clocked.turns.lost
    assert clocked.turns.decide(clocked.now) == Swap(BASE)


def test_weights_are_replaced_under_all_that_runs_when_all_of_it_is_to_go_on_with_newer_ones() -> None:
    clocked = at_home((1, A), (2, A))
    clocked.change((1, B))
    clocked.settle()
    assert (clocked.updates, clocked.waiting) == ([], {1})
    clocked.change((2, B))
    clocked.settle()
    assert (clocked.updates, clocked.swaps, clocked.running) == ([B], [A], {1, 2})
    assert (clocked.waiting, clocked.turns.resident) == (set(), B)


def test_what_is_to_finish_on_its_weights_ends_before_they_are_replaced() -> None:
    clocked = at_home((1, A), (2, A))
    clocked.change((1, B))
    clocked.settle()
    clocked.finish(2)
    clocked.settle()
    assert (clocked.updates, clocked.running) == ([B], {1})


def test_of_several_newer_weights_all_go_on_with_the_newest() -> None:
    clocked = at_home((1, A), (2, A), (3, A))
    clocked.change((1, B), (2, C), (3, B))
    clocked.settle()
    assert (clocked.updates, clocked.waiting, clocked.turns.resident) == ([C], set(), C)
    clocked.change((1, B), (3, C))
    clocked.settle()
    assert (clocked.updates, clocked.waiting) == ([C], set()), "what they have already is not put in again"


def test_new_requests_keep_no_update_from_coming_once_the_turn_of_their_weights_is_over() -> None:
    clocked = at_home((1, A), (2, A))
    clocked.change((1, B))
    clocked.arrive((3, A))
    clocked.settle()
    assert clocked.running == {1, 2, 3}
    clocked.now += TURN_S
    assert not clocked.turns.is_open(A, clocked.now)
    clocked.arrive((4, A), (5, B))
    clocked.settle()
    assert clocked.running == {1, 2, 3}
    clocked.finish(2, 3)
    clocked.settle()
    # The old weights are asked for, too: the turn is over, and what comes next waits for what runs.
    assert (clocked.updates, clocked.running) == ([B], {1})
    clocked.finish(1)
    clocked.settle()
    assert (clocked.swaps, clocked.running) == ([A, A], {4})


def test_an_update_takes_no_turn_from_those_who_wait_for_other_weights() -> None:
    clocked = at_home((1, A))
    clocked.arrive((2, OTHER))
    clocked.now += TURN_S
    clocked.change((1, B))
    clocked.arrive((3, B))
    clocked.settle()
    assert (clocked.updates, clocked.running) == ([B], {1})
    clocked.now += IDLE_GRACE_S
    clocked.finish(1)
    clocked.settle()
    assert (clocked.swaps, clocked.running) == ([A, OTHER], {2})


def test_those_who_wait_for_newer_weights_run_after_the_update_that_brings_them() -> None:
    clocked = at_home((1, A))
    clocked.now += TURN_S
    clocked.arrive((2, B))
    clocked.change((1, B))
    clocked.settle()
    assert (clocked.updates, clocked.swaps, clocked.running) == ([B], [A], {1, 2})


def test_however_fast_newer_weights_come_what_runs_makes_steps_between_two_updates() -> None:
    clocked = at_home((1, A))
    clocked.change((1, B))
    clocked.settle()
    clocked.change((1, C))
    wait = clocked.settle()
    assert (clocked.updates, wait.until) == ([B], clocked.now + SWAP_S)
    clocked.now += SWAP_S
    clocked.settle()
    assert clocked.updates == [B, C]


def test_newer_weights_that_are_refused_leave_what_runs_as_it_is_and_the_next_best_are_taken() -> None:
    clocked = at_home((1, A), (2, A))
    clocked.change((1, B), (2, C))
    clocked.arrive((3, C))
    assert clocked.turns.decide(clocked.now) == Update(C)
    assert clocked.turns.refused(clocked.now, 0.0) == (3, 2)
    clocked.waiting.discard(2)
    clocked.settle()
    assert (clocked.updates, clocked.turns.resident) == ([], A), "one of the two stays"
    clocked.finish(2)
    clocked.settle()
    assert clocked.updates == [B]


def test_what_runs_makes_steps_after_a_refusal_for_as_long_as_it_had_to_stand_still_for_it() -> None:
    clocked = at_home((1, A))
    clocked.change((1, B))
    assert clocked.turns.decide(clocked.now) == Update(B)
    assert clocked.turns.refused(clocked.now, 0.5) == (1,)
    clocked.change((1, C))
    assert clocked.turns.decide(clocked.now) == Wait(clocked.now + 0.5)
    clocked.now += 0.5
    assert clocked.turns.decide(clocked.now) == Update(C)


def test_after_an_update_that_broke_off_all_leave_before_the_base_weights_come() -> None:
    clocked = at_home((1, A), (2, A))
    clocked.change((1, B), (2, B))
    clocked.arrive((3, B), (4, BASE))
    assert clocked.turns.decide(clocked.now) == Update(B)
    assert clocked.turns.broke() == (3,)
    assert not clocked.turns.lost
    assert not clocked.turns.is_open(BASE, clocked.now)
    clocked.finish(1)
    assert clocked.turns.decide(clocked.now) == Wait()
    clocked.finish(2)
    clocked.settle()
    assert (clocked.swaps, clocked.running) == ([A, BASE], {4})


def test_one_that_leaves_while_it_waits_for_newer_weights_asks_for_none() -> None:
    clocked = at_home((1, A), (2, A))
    clocked.change((1, B))
    clocked.finish(1)
    clocked.settle()
    assert (clocked.updates, clocked.running) == ([], {2})
