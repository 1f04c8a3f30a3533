"""Which snapshots make room for others: a pure decision.

Invariant: nothing goes that was made or sampled within the budget's `keep` seconds, and nothing while its
owner and all owners together are within their budgets.
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
    """

    total_bytes: int
    owner_bytes: int
    keep: float = 3600.0


def to_let_go(
    candidates: Iterable[StoredSnapshot], owners: Mapping[str, int], budget: SnapshotBudget, now: float
) -> list[StoredSnapshot]:
    """Those that have to go, in order.

    Args:
        candidates: least recently used first; each may be named more than once.
        owners: bytes of all snapshots of every owner.
    """
    held = dict(owners)
    total = sum(held.values())
    chosen: dict[tuple[str, int], StoredSnapshot] = {}
    for snapshot in sorted(candidates, key=lambda one: one.last_used):
        key = (snapshot.model_id, snapshot.version)
        over = total > budget.total_bytes or held.get(snapshot.owner, 0) > budget.owner_bytes
        if key in chosen or not over or now - snapshot.last_used < budget.keep:
            continue
        chosen[key] = snapshot
        total -= snapshot.size_bytes
        held[snapshot.owner] = held.get(snapshot.owner, 0) - snapshot.size_bytes
    return list(chosen.values())
