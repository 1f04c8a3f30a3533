"""Which snapshots make room for others, and who has to wait until they have: pure decisions.

Invariant: nothing goes while its owner and all owners together are within their budgets. Beyond them nothing
goes that was made or sampled within the budget's `keep` seconds; of an owner who takes too much, nothing
within `keep_superseded` seconds, and its models' newest versions stay for `keep`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from services.gateway.records.snapshot import StoredSnapshot


@dataclass(frozen=True)
class SnapshotBudget:
    """What unnamed snapshots may take.

    Attributes:
        total_bytes: of all owners.
        owner_bytes: of one.
        keep: seconds after its last use for which a snapshot stays whatever the budgets say.
        keep_superseded: the same of one that is not its model's newest, where its owner takes too much. A use
            is noted once a minute, so this is more than that.
    """

    total_bytes: int
    owner_bytes: int
    keep: float = 3600.0
    keep_superseded: float = 120.0


@dataclass(frozen=True)
class Excess:
    """That an owner takes too much: so many bytes, of at most so many by the flag."""

    held: int
    most: int
    flag: str


def excess(mine: int, total: int, owners: int, budget: SnapshotBudget) -> Excess | None:
    """Whether an owner takes too much: more than one may, or more than an even share where all together do.

    Args:
        mine: bytes of the owner's snapshots.
        total: of those of all owners.
        owners: that have any.
    """
    if mine > budget.owner_bytes:
        return Excess(mine, budget.owner_bytes, "--snapshot-owner-bytes")
    if total > budget.total_bytes and mine > budget.total_bytes // owners:
        return Excess(mine, budget.total_bytes // owners, "--snapshot-bytes")
    return None


def expected(mine: int, listed: int, coming: int, budget: SnapshotBudget) -> int:
    """Bytes that an owner's snapshots come to with those that are to come: each as large as the mean.

    Args:
        mine: bytes of those that are listed.
        listed: how many they are; of an owner who has none, one is taken for a 64th of what it may have.
    """
    return mine + coming * (mine // listed if listed else budget.owner_bytes // 64)


def to_let_go(
    candidates: Iterable[StoredSnapshot],
    held: Mapping[str, int],
    newest: Mapping[str, int],
    budget: SnapshotBudget,
    now: float,
) -> list[StoredSnapshot]:
    """Those that have to go, in order.

    Args:
        candidates: in any order; each may be named more than once.
        held: bytes of all snapshots of every owner.
        newest: the newest version of each candidate's model.
    """
    left, total = dict(held), sum(held.values())
    chosen: dict[tuple[str, int], StoredSnapshot] = {}
    for snapshot in sorted(candidates, key=lambda one: one.last_used):
        key, mine = (snapshot.model_id, snapshot.version), left.get(snapshot.owner, 0)
        too_much = excess(mine, total, len(held), budget) is not None
        if key in chosen or not (too_much or total > budget.total_bytes):
            continue
        superseded = snapshot.version < newest[snapshot.model_id]
        if now - snapshot.last_used < (budget.keep_superseded if too_much and superseded else budget.keep):
            continue
        chosen[key] = snapshot
        total -= snapshot.size_bytes
        left[snapshot.owner] = mine - snapshot.size_bytes
    return list(chosen.values())
