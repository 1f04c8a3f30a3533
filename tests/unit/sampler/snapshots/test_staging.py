"""Which full snapshots are kept in host memory."""

from __future__ import annotations

from services.sampler.engine.snapshot_key import SnapshotKey
from services.sampler.snapshots.staging import Staging

A, B, C = (SnapshotKey("session:train:0", version) for version in (1, 2, 3))


def filled(staging: Staging, *keys: SnapshotKey) -> Staging:
    for key in keys:
        staging.reserve(key, 10)
        staging.complete(key)
    return staging


def test_the_least_recently_used_one_gives_way_before_the_new_one_arrives() -> None:
    staging = filled(Staging(20, copies=1), A, B)
    assert staging.find(A) == 1
    assert staging.reserve(C, 10) == (3, [2])
    assert staging.keys() == [A]
    staging.complete(C)
    assert staging.keys() == [A, C]


def test_one_that_has_not_arrived_is_not_found_and_does_not_give_way() -> None:
    staging = filled(Staging(20, copies=1), A)
    assert staging.reserve(B, 10) == (2, [])
    assert staging.find(B) is None
    assert staging.reserve(C, 20) == (None, [1])
    staging.complete(B)
    assert staging.find(B) == 2


def test_every_workers_copy_counts() -> None:
    staging = Staging(20, copies=2)
    assert staging.reserve(A, 11) == (None, [])
    assert staging.reserve(B, 10) == (1, [])


def test_one_that_is_larger_than_the_budget_is_not_kept_and_drives_nobody_out() -> None:
    staging = filled(Staging(20, copies=1), A)
    assert staging.reserve(B, 21) == (None, [])
    assert staging.keys() == [A]


def test_a_second_copy_is_not_kept() -> None:
    staging = filled(Staging(100, copies=1), A)
    assert staging.reserve(A, 10) == (None, [])


def test_one_that_did_not_arrive_leaves_its_room_and_its_id_is_not_given_again() -> None:
    staging = Staging(10, copies=1)
    assert staging.reserve(A, 10) == (1, [])
    assert staging.cancel(A) == 1
    assert staging.reserve(B, 10) == (2, [])
