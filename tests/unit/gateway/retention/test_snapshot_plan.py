"""Which snapshots make room for others."""

from __future__ import annotations

from services.gateway.records.snapshot import StoredSnapshot
from services.gateway.retention.snapshot_plan import SnapshotBudget, to_let_go

NOW = 100_000.0
BUDGET = SnapshotBudget(total_bytes=100, owner_bytes=60, keep=3600)


def snapshot(version: int, owner: str = "a", size: int = 20, age: float = 7200) -> StoredSnapshot:
    return StoredSnapshot(f"{owner}:train:0", version, owner, size, NOW - age)


def chosen(candidates: list[StoredSnapshot], budget: SnapshotBudget = BUDGET) -> list[int]:
    owners: dict[str, int] = {}
    for one in set(candidates):
        owners[one.owner] = owners.get(one.owner, 0) + one.size_bytes
    return [one.version for one in to_let_go(candidates, owners, budget, NOW)]


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
