"""Which snapshot gives way when memory is full."""

from __future__ import annotations

from services.sampler.engine.snapshot_key import SnapshotKey
from services.sampler.snapshots.residency import Residency

A, B, C = (SnapshotKey("session:train:0", version) for version in (1, 2, 3))


def filled(budget: int, *keys: SnapshotKey) -> Residency:
    residency = Residency(budget, first_adapter_id=9)
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
    residency.wait_for(A)
    residency.wait_for(A)
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


def test_a_second_copy_of_a_version_is_dropped_and_the_first_stays() -> None:
    residency = filled(100, A)
    assert residency.add(A, 17, 10) == [17]
    assert residency.acquire(A) == 9


def test_adapter_ids_are_never_given_twice() -> None:
    residency = filled(10, A)
    assert residency.add(B, residency.new_adapter_id(), 10) == [9]
    assert residency.new_adapter_id() == 11
