"""Which snapshot gives way when memory is full."""

from __future__ import annotations

from services.sampler.engine.snapshot_key import SnapshotKey
from services.sampler.snapshots.residency import Residency

A, B, C, D, E = (SnapshotKey("session:train:0", version) for version in range(1, 6))


def filled(budget: int, *keys: SnapshotKey) -> Residency:
    residency = Residency(budget, first_adapter_id=9, copies=1)
    for key in keys:
        assert residency.add(key, residency.new_adapter_id(), 10) == []
    return residency


def test_the_least_recently_used_snapshot_gives_way() -> None:
    residency = filled(20, A, B)
    assert residency.acquire(A) == 9
    residency.release(A)
    assert residency.add(C, residency.new_adapter_id(), 10) == [10]
    assert residency.keys() == [A, C]
    assert residency.acquire(B) is None


def test_a_snapshot_in_use_stays_until_its_last_user_is_gone() -> None:
    residency = filled(10, A)
    residency.acquire(A)
    residency.acquire(A)
    residency.release(A)
    assert residency.add(B, 10, 10) == []
    residency.release(A)
    assert residency.add(C, 11, 10) == [9, 10]


def test_a_snapshot_that_a_request_waits_for_stays_until_it_is_used() -> None:
    residency = filled(10)
    residency.wait_for(A, 10)
    residency.wait_for(A, 10)
    assert residency.add(A, 9, 10) == []
    residency.stop_waiting(A)
    assert residency.add(B, 10, 10) == []
    assert residency.acquire(A) == 9
    residency.stop_waiting(A)
    residency.release(A)
    assert residency.add(C, 11, 10) == [10, 9]


def test_the_newest_snapshot_stays_even_when_it_alone_is_over_the_budget() -> None:
    residency = filled(10)
    assert residency.add(A, 9, 1000) == []
    assert residency.acquire(A) == 9


def test_a_second_copy_of_a_version_is_dropped_and_the_first_stays_once_it_was_used() -> None:
    residency = filled(100, A)
    assert residency.acquire(A) == 9
    residency.release(A)
    assert residency.add(A, 17, 10) == [17]
    assert residency.acquire(A) == 9


def test_a_second_copy_of_a_version_that_nobody_used_takes_its_place() -> None:
    """Its trainer died before the first was stored, and may have come to other last bits."""
    residency = filled(30, A, B)
    residency.acquire(B)
    assert residency.add(A, 17, 25) == [9]
    assert residency.acquire(A) == 17


def test_adapter_ids_are_never_given_twice() -> None:
    residency = filled(10, A)
    assert residency.add(B, residency.new_adapter_id(), 10) == [9]
    assert residency.new_adapter_id() == 11


def test_what_is_loaded_ahead_of_its_turn_fits_with_all_that_cannot_give_way() -> None:
    residency = filled(30, A, B)
    residency.acquire(A)
    residency.wait_for(C, 10)
    residency.wait_for(D, 10)
    assert residency.ahead() == [C, D], "B gives way"
    residency.wait_for(B, 0)
    assert residency.ahead() == [C]
    residency.release(A)
    assert residency.ahead() == [C, D], "and so does A"


def test_who_has_waited_for_longest_is_loaded_first_and_what_needs_little_does_not_overtake() -> None:
    residency = filled(20, A)
    residency.acquire(A)
    residency.wait_for(B, 20)
    residency.wait_for(C, 10)
    residency.wait_for(B, 20)
    assert residency.ahead() == []
    residency.stop_waiting(B)
    assert residency.ahead() == []
    residency.stop_waiting(B)
    assert residency.ahead() == [C]


def test_what_is_being_loaded_is_not_loaded_again_and_takes_room_until_it_failed() -> None:
    residency = filled(20)
    for key in (A, B, C):
        residency.wait_for(key, 10)
    assert residency.ahead() == [A, B]
    assert residency.load(A, 10) == residency.load(B, 10) == []
    residency.wait_for(A, 10)
    assert residency.ahead() == []
    residency.loaded(A)
    assert residency.ahead() == [C], "A is tried again at its turn"
    residency.failed(C)
    assert residency.ahead() == [], "and so is what could not even be found"


def test_others_give_way_before_a_snapshot_is_loaded_also_for_those_that_are_being_loaded() -> None:
    residency = filled(30, A, B, C)
    residency.wait_for(D, 10)
    assert residency.load(D, 10) == [9]
    assert residency.load(E, 10) == [10]
    residency.loaded(E)
    residency.loaded(D)
    assert residency.add(D, 12, 10) == [], "there is room by now"
    assert residency.keys() == [C, D]


def test_what_every_worker_keeps_a_copy_of_counts_as_often() -> None:
    residency = Residency(40, first_adapter_id=9, copies=2)
    for key in (A, B, C):
        residency.wait_for(key, 10)
    assert residency.ahead() == [A, B]
    assert residency.add(D, 9, 20) == residency.add(A, 10, 20) == []
    assert residency.load(B, 10) == [9]


def test_what_came_while_it_was_waited_for_is_not_loaded() -> None:
    residency = filled(100)
    residency.wait_for(A, 10)
    assert residency.ahead() == [A]
    assert residency.add(A, 9, 10) == []
    assert residency.ahead() == []
