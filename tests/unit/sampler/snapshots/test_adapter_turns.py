"""More adapters than the engine has slots for: who is in it, and for how long."""

from __future__ import annotations

import random

from services.sampler.engine.snapshot_key import SnapshotKey
from services.sampler.snapshots.adapter_turns import TURN_S, AdapterTurns
from services.sampler.snapshots.turns import Run, Wait

A, B, C, D = (SnapshotKey("session:train:0", version) for version in (1, 2, 3, 4))


class Clocked:
    """Turns of two slots with a clock of their own, and what runs."""

    def __init__(self, slots: int = 2) -> None:
        self.now = 100.0
        self.slots = slots
        self.turns = AdapterTurns(slots)
        self.adapter_of: dict[int, SnapshotKey] = {}
        self.running: set[int] = set()

    def arrive(self, *requests: tuple[int, SnapshotKey]) -> None:
        for ticket, adapter in requests:
            self.adapter_of[ticket] = adapter
            self.turns.arrive(ticket, adapter)

    def finish(self, *tickets: int) -> None:
        for ticket in tickets:
            self.running.discard(ticket)
            self.turns.leave(ticket)

    def settle(self) -> Wait:
        """Does all there is to do now."""
        while isinstance(decision := self.turns.decide(self.now), Run):
            self.running |= set(decision.tickets)
            assert len({self.adapter_of[ticket] for ticket in self.running}) <= self.slots
        return decision


def busy(*requests: tuple[int, SnapshotKey]) -> Clocked:
    clocked = Clocked()
    clocked.arrive(*requests)
    clocked.settle()
    return clocked


def test_as_many_adapters_as_there_are_slots_run_at_once_and_all_their_requests() -> None:
    clocked = busy((1, A), (2, B), (3, A), (4, B))
    assert clocked.running == {1, 2, 3, 4}
    assert clocked.turns.waiting == 0


def test_one_more_adapter_waits_for_a_slot_and_gets_the_first_that_falls_free() -> None:
    clocked = busy((1, A), (2, B), (3, C))
    assert (clocked.running, clocked.turns.waiting) == ({1, 2}, 1)
    clocked.finish(2)
    clocked.settle()
    assert clocked.running == {1, 3}


def test_an_adapter_that_is_used_all_the_time_takes_on_nothing_new_after_its_turn() -> None:
    clocked = busy((1, A))
    clocked.now += 0.5
    clocked.arrive((2, B), (3, C))
    wait = clocked.settle()
    assert wait.until == clocked.now - 0.5 + TURN_S
    clocked.arrive((4, A))
    clocked.settle()
    assert clocked.running == {1, 2, 4}
    clocked.now += TURN_S
    clocked.settle()
    assert not clocked.turns.is_open(A)
    clocked.arrive((5, A), (6, B))
    clocked.settle()
    # B came later: only one slot is wanted, and A has had its own longer.
    assert clocked.running == {1, 2, 4, 6}
    clocked.finish(1, 4)
    clocked.settle()
    assert clocked.running == {2, 3, 6}


def test_as_many_slots_are_vacated_as_adapters_wait() -> None:
    clocked = busy((1, A), (2, B), (3, C), (4, D))
    clocked.now += TURN_S
    clocked.settle()
    assert not clocked.turns.is_open(A) and not clocked.turns.is_open(B)


def test_an_adapter_keeps_its_slot_when_those_that_waited_give_up() -> None:
    clocked = busy((1, A), (2, B), (3, C))
    clocked.now += TURN_S
    clocked.settle()
    clocked.arrive((4, A))
    clocked.settle()
    assert clocked.running == {1, 2}
    clocked.finish(3)
    clocked.settle()
    assert clocked.running == {1, 2, 4}
    assert clocked.turns.waiting == 0


def test_the_adapter_whose_request_has_waited_longest_is_the_next() -> None:
    clocked = busy((1, A), (2, B), (3, D), (4, C), (5, D))
    clocked.finish(1)
    clocked.settle()
    assert clocked.running == {2, 3, 5}


def test_a_request_that_gives_up_leaves_nothing_behind() -> None:
    clocked = busy((1, A), (2, B), (3, C))
    clocked.finish(1, 2, 3)
    assert (clocked.settle(), clocked.turns.waiting) == (Wait(), 0)
    assert all(clocked.turns.is_open(adapter) for adapter in (A, B, C, D))


def test_nobody_starves_while_twice_as_many_busy_tenants_as_slots_come_back_for_ever() -> None:
    chance = random.Random(7)
    longest = 1.5
    clocked = Clocked()
    tenants = [A, B, C, D]
    began = dict.fromkeys(range(16), clocked.now)
    waits: list[float] = []
    served = dict.fromkeys(tenants, 0)
    ends: dict[int, float] = {}
    clocked.arrive(*((ticket, tenants[ticket % 4]) for ticket in began))
    for _ in range(20_000):
        clocked.settle()
        for ticket in clocked.running - ends.keys():
            waits.append(clocked.now - began[ticket])
            ends[ticket] = clocked.now + chance.uniform(0.1, longest)
        clocked.now += 0.01
        for ticket in [t for t, end in ends.items() if end <= clocked.now]:
            del ends[ticket]
            served[tenants[ticket % 4]] += 1
            clocked.finish(ticket)
            clocked.arrive((ticket, tenants[ticket % 4]))
            began[ticket] = clocked.now
    # Two others are before it, each for a turn and its last generation.
    assert max(waits) < 2 * (TURN_S + longest) + 0.1
    assert min(served.values()) > 0.8 * max(served.values())


def test_a_sample_of_an_hour_in_the_oldest_slot_does_not_keep_who_waits_from_the_other() -> None:
    clocked = busy((1, A), (2, B))
    clocked.arrive((3, C))
    clocked.now += TURN_S
    # A has had its slot longest, and takes on nothing new.
    assert clocked.settle().until == clocked.now + TURN_S
    clocked.arrive((4, B))
    clocked.settle()
    assert 4 in clocked.running
    clocked.now += TURN_S
    clocked.arrive((5, B))
    clocked.settle()
    assert 5 not in clocked.running
    clocked.finish(2, 4)
    clocked.settle()
    assert clocked.running == {1, 3}


def changing(clocked: Clocked, *requests: tuple[int, SnapshotKey]) -> None:
    for ticket, adapter in requests:
        clocked.turns.change(ticket, adapter)


def granted(clocked: Clocked) -> list[int]:
    """Who may enter now, in order."""
    found: list[int] = []
    while isinstance(decision := clocked.turns.decide(clocked.now), Run):
        found += decision.tickets
    return found


def test_a_request_that_runs_changes_to_an_adapter_with_a_free_slot_and_holds_both_until_it_has() -> None:
    clocked = busy((1, A))
    changing(clocked, (1, B))
    assert granted(clocked) == [1]
    assert not clocked.turns.is_open(C), "both slots are held"
    clocked.turns.changed(1)
    assert clocked.turns.is_open(C)
    assert clocked.turns.waiting == 0


def test_requests_that_all_change_to_one_adapter_take_over_their_slot_where_there_is_no_other() -> None:
    clocked = busy((1, A), (2, A), (3, C))
    changing(clocked, (1, B))
    assert granted(clocked) == [], "another one stays with the adapter"
    changing(clocked, (2, B))
    assert granted(clocked) == [1, 2]
    clocked.arrive((4, B))
    assert granted(clocked) == [4], "it has a slot as any other"
    clocked.turns.changed(1)
    clocked.turns.changed(2)
    clocked.finish(1, 2, 4)
    assert clocked.turns.is_open(A)


def test_who_changes_keeps_no_other_adapter_waiting_longer() -> None:
    clocked = busy((1, A), (2, B))
    clocked.arrive((3, D))
    clocked.now += TURN_S
    granted(clocked)
    assert not clocked.turns.is_open(A)
    changing(clocked, (1, C))
    assert granted(clocked) == [1]
    assert not clocked.turns.is_open(C), "a slot that was taken over had its turn"
    clocked.turns.changed(1)
    clocked.arrive((4, C))
    assert granted(clocked) == []
    # One that takes on nothing new is joined by who frees another slot so.
    changing(clocked, (2, C))
    assert granted(clocked) == [2]
    clocked.turns.changed(2)
    assert granted(clocked) == [3, 4], "who waited longest has the slot that fell free, and nobody waits then"


def test_who_gives_up_while_it_changes_leaves_all_that_it_held_and_waited_for() -> None:
    clocked = busy((1, A), (2, B), (3, A))
    changing(clocked, (1, C))
    clocked.finish(1)
    assert (granted(clocked), clocked.turns.waiting) == ([], 0)
    clocked.finish(3)
    changing(clocked, (2, C))
    assert granted(clocked) == [2]
    clocked.finish(2)
    assert all(clocked.turns.is_open(each) for each in (A, B, C))


def test_no_more_adapters_than_slots_run_whoever_comes_changes_and_goes() -> None:
    chance = random.Random(7)
    for _ in range(50):
        clocked, held, wanted = Clocked(), dict[int, set[SnapshotKey]](), dict[int, SnapshotKey]()
        for ticket in range(200):
            clocked.now += chance.random()
            act = chance.random()
            still = [one for one in held if one not in wanted]
            if act < 0.4:
                clocked.arrive((ticket, chance.choice((A, B, C, D))))
            elif act < 0.6 and still:
                one = chance.choice(still)
                (present,) = held[one]
                wanted[one] = chance.choice([each for each in (A, B, C, D) if each != present])
                changing(clocked, (one, wanted[one]))
            elif act < 0.8 and held:
                one = chance.choice(list(held))
                held.pop(one)
                wanted.pop(one, None)
                clocked.finish(one)
            while isinstance(decision := clocked.turns.decide(clocked.now), Run):
                for one in decision.tickets:
                    held.setdefault(one, set()).add(wanted.get(one, clocked.adapter_of.get(one, A)))
            for one in [one for one, has in held.items() if one in wanted and wanted[one] in has]:
                if chance.random() < 0.5:
                    held[one] = {wanted.pop(one)}
                    clocked.turns.changed(one)
            # Where a slot was taken over its former adapter is not counted: all leave it in one step.
            present = {wanted[one] if wanted.get(one) in has else min(has) for one, has in held.items()}
            assert len(present) <= clocked.slots
