"""Which trainer of its base model a model is on.

Invariants: a model's trainer is written down, under its lease's epoch, before anything is sent there, so the
model stays there whichever gateways come and go. It moves only when that trainer was away for long while
another one was ready; the epoch of a move is above all that the last trainer has seen, so a copy that it
keeps can be told from the model. A new model goes to the trainer with the least to do, by what trainers
announce and by what this gateway has placed since.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from services.common.state.journal import Journal
from services.common.state.journal_records import JournalIndex
from services.common.state.registry import ServiceRecord
from services.gateway.cluster.discovery import Services
from services.gateway.dispatch.leases import Lease

log = logging.getLogger(__name__)


def choose(
    ready: Sequence[ServiceRecord],
    placed: str,
    away: float,
    patience: float,
    load: Callable[[ServiceRecord], tuple[int, int]],
) -> ServiceRecord | None:
    """The trainer to use; None = wait.

    Args:
        ready: live trainers of the base model that take work.
        placed: id of the trainer that the model is on; empty = it is on none yet.
        away: seconds for which that one was not among the ready ones.
        patience: seconds for which its return is waited for.
        load: what a trainer has to do: models, then operations that wait.
    """
    home = next((record for record in ready if record.id == placed), None)
    if home is not None:
        return home
    if placed and away < patience:
        return None
    return min(ready, key=lambda record: (load(record), record.id), default=None)


class Loads:
    """How much trainers have to do: what they announced last, and what this gateway has placed since."""

    def __init__(self) -> None:
        self._placed: dict[str, tuple[int, int]] = {}

    def of(self, record: ServiceRecord) -> tuple[int, int]:
        """(models, operations that wait) of a trainer."""
        announced, since = self._placed.get(record.incarnation, (record.models, 0))
        return record.models + (since if announced == record.models else 0), record.queued

    def note(self, record: ServiceRecord, live: Sequence[ServiceRecord]) -> None:
        """A model was placed on one of the live trainers."""
        announced, since = self._placed.get(record.incarnation, (record.models, 0))
        since = since + 1 if announced == record.models else 1
        alive = {one.incarnation for one in live}
        self._placed = {name: count for name, count in self._placed.items() if name in alive}
        self._placed[record.incarnation] = (record.models, since)


class Placement:
    """The trainer of one model, under one lease.

    Args:
        fence: gives the lease a higher epoch.
        loads: shared by all models of this gateway.
        patience: seconds to wait for a trainer that is away, when another one is there.
    """

    def __init__(
        self,
        lease: Lease,
        fence: Callable[[Lease], Awaitable[None]],
        journal: Journal,
        trainers: Services,
        loads: Loads,
        patience: float,
    ) -> None:
        self._lease = lease
        self._fence = fence
        self._journal = journal
        self._trainers = trainers
        self._loads = loads
        self._patience = patience
        self._away_since: float | None = None

    def choose(self, index: JournalIndex) -> ServiceRecord | None:
        """The trainer to use; None = it is waited for. One that the model is not on yet is to be settled on
        first."""
        ready = [record for record in self._trainers.serving(index.base_model) if record.state == "ready"]
        now = asyncio.get_running_loop().time()
        if any(record.id == index.trainer for record in ready):
            self._away_since = None
        elif self._away_since is None:
            self._away_since = now
        away = 0.0 if self._away_since is None else now - self._away_since
        return choose(ready, index.trainer, away, self._patience, self._loads.of)

    async def settle(self, index: JournalIndex, trainer: ServiceRecord) -> None:
        """Has the model be on a trainer from now on. Calls to another one must have ended.

        Raises:
            redis.exceptions.RedisError: Redis does not answer.
        """
        if trainer.id == index.trainer:
            return
        if index.trainer:
            # What the last one has of the model is then of a lower epoch than the move.
            await self._fence(self._lease)
        if self._lease.lost:
            return
        if not await self._journal.place(self._lease.model_id, self._lease.epoch, trainer.id):
            self._lease.lose()
            return
        self._loads.note(trainer, self._trainers.all())
        if index.trainer:
            log.info("model %s moves from %s to %s", self._lease.model_id, index.trainer, trainer.id)

    def ready(self, incarnation: str | None) -> ServiceRecord | None:
        """The trainer of this incarnation, while it takes work."""
        return next(
            (
                record
                for record in self._trainers.all()
                if record.incarnation == incarnation and record.state == "ready"
            ),
            None,
        )
