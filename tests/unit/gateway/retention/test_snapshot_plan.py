"""Which snapshots make room for others."""

from __future__ import annotations

from services.gateway.records.snapshot import StoredSnapshot
from services.gateway.retention.snapshot_plan import Excess, SnapshotBudget, excess, to_let_go

NOW = 100_000.0
BUDGET = SnapshotBudget(total_bytes=100, owner_bytes=60, keep=3600, keep_superseded=120)


def snapshot(version: int, owner: str = "a", size: int = 20, age: float = 7200) -> StoredSnapshot:
    return StoredSnapshot(f"{owner}:train:0", version, owner, size, NOW - age)


def chosen(candidates: list[StoredSnapshot], newest: int = 0) -> list[int]:
    """Versions that go; those below `newest` are superseded."""
    owners: dict[str, int] = {}
    for one in set(candidates):
        owners[one.owner] = owners.get(one.owner, 0) + one.size_bytes
    newest_of = {one.model_id: newest for one in candidates}
    return [one.version for one in to_let_go(candidates, owners, newest_of, BUDGET, NOW)]


def test_nothing_goes_within_the_budgets() -> None:
    assert chosen([snapshot(1), snapshot(2), snapshot(3)]) == []


def test_an_owner_who_is_over_loses_what_was_not_sampled_for_longest() -> None:
    assert chosen([snapshot(1, age=8000), snapshot(2, age=9000), snapshot(3), snapshot(4)]) == [2]


def test_another_owner_loses_nothing_for_that() -> None:
    others = [snapshot(9, owner="b", age=90_000)]
    assert chosen([*others, *(snapshot(version, age=8000 - version) for version in range(1, 5))]) == [1]


def test_over_the_whole_budget_the_least_recently_sampled_goes_whose_ever_it_is() -> None:
    mine = [snapshot(version, age=9000 - version) for version in (1, 2, 3)]
    others = [snapshot(version, owner="b", age=90_000 - version) for version in (4, 5, 6)]
    assert chosen([*mine, *others]) == [4]


def test_what_was_sampled_within_the_hour_stays_whatever_the_budgets_say() -> None:
    assert chosen([snapshot(version, age=3599) for version in range(10)]) == []


def test_a_snapshot_that_is_named_twice_counts_once() -> None:
    four = [snapshot(version, age=9000 - version) for version in range(1, 5)]
    assert chosen([*four, *four]) == [1]


def test_of_an_owner_who_takes_too_much_superseded_ones_go_minutes_after_they_were_sampled() -> None:
    loop = [snapshot(version, age=300 - 40 * version) for version in range(1, 7)]
    assert chosen(loop, newest=6) == [1, 2, 3]
    assert chosen([*loop[:4], snapshot(5, age=90), snapshot(6, age=200)], newest=6) == [1, 2, 3]


def test_the_newest_of_a_model_stays_for_the_hour() -> None:
    assert (
        chosen([snapshot(7, age=3599), *(snapshot(version, age=100) for version in range(4))], newest=7) == []
    )


def test_over_the_whole_budget_only_who_has_more_than_an_even_share_loses_what_is_recent() -> None:
    mine = [snapshot(version, age=300 - version) for version in (1, 2, 3)]
    others = [snapshot(version, owner="b", age=400 - version) for version in (4, 5)]
    few = [snapshot(6, owner="c", age=500)]
    assert chosen([*mine, *others, *few], newest=9) == [4]


def test_an_owner_takes_too_much_above_its_bound_or_above_an_even_share_of_what_is_full() -> None:
    assert excess(60, 60, 1, BUDGET) is None
    assert excess(61, 61, 1, BUDGET) == Excess(61, 60, "--snapshot-owner-bytes")
    assert excess(50, 101, 2, BUDGET) is None
    assert excess(51, 101, 2, BUDGET) == Excess(51, 50, "--snapshot-bytes")
