"""What a replica knows of versions: each counts once, and what is kept is bounded."""

from __future__ import annotations

from services.sampler.engine.snapshot_key import SnapshotKey
from services.sampler.snapshots.versions import MOST_MODELS, MOST_VERSIONS, KnownVersions


def known(*versions: int) -> KnownVersions:
    found = KnownVersions()
    for version in versions:
        found.note(SnapshotKey("a", version))
    return found


def test_newer_versions_are_counted_once_in_whatever_order_they_are_heard_of() -> None:
    versions = known(7, 3, 5, 7)
    assert [versions.newer(SnapshotKey("a", version)) for version in (1, 3, 4, 5, 7, 8)] == [3, 2, 2, 1, 0, 0]
    assert versions.newer(SnapshotKey("b", 1)) == 0


def test_of_a_model_the_newest_versions_are_kept() -> None:
    versions = known(*range(2 * MOST_VERSIONS))
    assert versions.newer(SnapshotKey("a", 0)) == MOST_VERSIONS
    assert versions.newer(SnapshotKey("a", 2 * MOST_VERSIONS - 3)) == 2
    # One that is older than all of these makes none of them leave.
    versions.note(SnapshotKey("a", -1))
    assert versions.newer(SnapshotKey("a", 2 * MOST_VERSIONS - 3)) == 2


def test_the_models_that_were_heard_of_last_are_known() -> None:
    versions = known(1, 2)
    for number in range(MOST_MODELS - 1):
        versions.note(SnapshotKey(str(number), 2))
    versions.note(SnapshotKey("a", 3))
    versions.note(SnapshotKey("another", 2))
    assert versions.newer(SnapshotKey("a", 1)) == 2
    assert versions.newer(SnapshotKey("0", 1)) == 0
