"""Room for unnamed sampler snapshots: what is let go for it, and who is refused more.

Invariants: all of this may be done twice, by any gateways, with the same effect; that a snapshot was let go
is remembered before its files go, so its clients are told. Of what an owner may have, a save takes its part
when it is accepted, which it gives back when it fails, or when another one lacks it later; what it comes to
may be larger than was expected.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Iterable

from services.common.contract.errors import LimitReached, TinsmithError
from services.common.process import clock
from services.common.process.pools import DELETIONS
from services.common.storage.data_dir import DataDir
from services.common.storage.directory import delete_directory
from services.common.telemetry.repeats import Repeats
from services.gateway.records.snapshot import SnapshotStore, StoredSnapshot
from services.gateway.retention.snapshot_plan import Excess, SnapshotBudget, excess, expected, to_let_go

log = logging.getLogger(__name__)

_AT_ONCE = 256
_PATIENCE_S = 10.0
"""A save waits so long for what is deleted for it. The sweep goes on with that."""
_SHARE = 0.5
"""What unnamed snapshots may take of their volume, and one owner of that, when no number is given."""


def budget_on(data: DataDir, total_bytes: int, owner_bytes: int) -> SnapshotBudget:
    """The budgets; 0 = half of the volume for all, half of that for one owner."""
    total = total_bytes or int(shutil.disk_usage(data.root).total * _SHARE)
    return SnapshotBudget(total, owner_bytes or int(total * _SHARE))


class SnapshotRoom:
    """What unnamed snapshots may take of their volume."""

    def __init__(self, snapshots: SnapshotStore, data: DataDir, budget: SnapshotBudget) -> None:
        self._snapshots = snapshots
        self._data = data
        self._budget = budget
        self._stay = Repeats(log, "a snapshot that is to make room stays for now")

    async def check(self, owner: str, model_id: str, version: int) -> bool:
        """To be called before an unnamed snapshot is accepted. What may go for it goes now.

        Returns:
            Whether it has its part only since now; `give_back` where it is not accepted.

        Raises:
            LimitReached: the owner has too much all the same.
        """
        new = await self._snapshots.expect(model_id, version, owner)
        if await self._excess(owner) is None:
            return new
        await self._snapshots.look_for_those_to_come(owner, but=(model_id, version))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                await self._make_room(await self._snapshots.oldest(_AT_ONCE, owner), owner)
        found = await self._excess(owner)
        if found is None:
            return new
        if new:
            await self.give_back(owner, model_id, version)
        raise LimitReached(
            f"the snapshots without a name of this API key would take {found.held} bytes with this one, and "
            f"may take {found.most} ({found.flag}); those that a newer one follows go "
            f"{self._budget.keep_superseded:g} s after their last use, others after {self._budget.keep:g} s; "
            "save less often, or end sessions that are done",
            about={"limit": found.flag},
        )

    async def give_back(self, owner: str, model_id: str, version: int) -> None:
        """An unnamed snapshot that had its part does not come."""
        await self._snapshots.expect_no_more(model_id, version, owner)

    async def keep_within(self) -> int:
        """Lets go of what is beyond the budgets; the bytes of all snapshots before."""
        held = await self._snapshots.owners()
        total = sum(held.values())
        candidates: list[StoredSnapshot] = []
        if total > self._budget.total_bytes:
            candidates += await self._snapshots.oldest(_AT_ONCE)
        for owner, mine in held.items():
            if excess(mine, total, len(held), self._budget) is not None:
                candidates += await self._snapshots.oldest(_AT_ONCE, owner)
        await self._make_room(candidates)
        return total

    async def remove(self, snapshot: StoredSnapshot) -> None:
        """Deletes a snapshot.

        Raises:
            Unavailable, OSError: not now. It is still listed.
        """
        path = self._data.snapshot(snapshot.model_id, snapshot.version)
        await DELETIONS.run(delete_directory, path)
        await self._snapshots.forget(snapshot.model_id, snapshot.version, snapshot.owner)

    async def _excess(self, owner: str) -> Excess | None:
        held = await self._held(owner)
        return excess(held[owner], sum(held.values()), len(held), self._budget)

    async def _held(self, owner: str | None) -> dict[str, int]:
        """Bytes of every owner's snapshots, and of what is to come of one's."""
        held = await self._snapshots.owners()
        if owner is not None:
            numbers = await self._snapshots.numbers(owner)
            held[owner] = expected(held.get(owner, 0), *numbers, self._budget)
        return held

    async def _make_room(self, candidates: list[StoredSnapshot], owner: str | None = None) -> None:
        """Lets go of what is beyond the budgets.

        Args:
            owner: for whose snapshots that are to come there is to be room, too.
        """
        newest = await self._newest(candidate.model_id for candidate in candidates)
        held = await self._held(owner)
        for snapshot in to_let_go(candidates, held, newest, self._budget, clock.to_judge()):
            name = f"{snapshot.version} of {snapshot.model_id}"
            try:
                await self._snapshots.mark_let_go(snapshot.model_id, snapshot.version)
                await self.remove(snapshot)
            except (TinsmithError, OSError) as error:
                self._stay.failed(name, error)
            else:
                self._stay.over(name)
                log.info("snapshot %s was let go to make room", name)

    async def _newest(self, models: Iterable[str]) -> dict[str, int]:
        return {
            model_id: max((one.version for one in await self._snapshots.of_model(model_id)), default=0)
            for model_id in set(models)
        }
