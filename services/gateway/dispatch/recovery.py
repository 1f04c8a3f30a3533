"""How long a model is tried for that cannot be brought where its journal is, and when it is given up.

Invariants: tries are counted over all gateways, by the pauses before them that were waited out: a gateway
that starts anew goes on counting, and time in which nobody tried is not counted. A model is lost only when
plan.py says so.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable

import prometheus_client

from services.common.contract import errors
from services.common.contract.errors import Internal, TinsmithError
from services.common.state.journal import Journal
from services.common.state.journal_records import InVain, error_result
from services.gateway.dispatch import plan
from services.gateway.dispatch.leases import Lease
from services.gateway.dispatch.publish_results import ResultPublisher

log = logging.getLogger(__name__)

IN_VAIN = prometheus_client.Counter(
    "tinsmith_models_tried_in_vain_total",
    "Tries to bring a model back, or to repeat what it had done, that failed",
)
LOST = prometheus_client.Counter("tinsmith_models_lost_total", "Models whose state was given up")


class Recovery:
    """The tries of one model, under one lease."""

    def __init__(
        self,
        lease: Lease,
        journal: Journal,
        publisher: ResultPublisher,
        session_finished: Callable[[str], Awaitable[bool]],
    ) -> None:
        self._lease = lease
        self._journal = journal
        self._publisher = publisher
        self._session_finished = session_finished
        self._times: Counter[int] = Counter()
        """seq_id -> how often it could not be repeated."""
        self._tried = 0.0
        self._pause = 0.0

    def pause(self, seq_id: int) -> float:
        """Seconds until an operation that could not be repeated is to be tried again."""
        self._times[seq_id] += 1
        return plan.backoff(self._times[seq_id], first=0.1, most=plan.LONGEST_PAUSE_S)

    async def ends_with_operation(self, seq_id: int, error: TinsmithError, pause: float) -> bool:
        """Whether that is the end, here at least: the model is lost, or the lease.

        Args:
            pause: seconds until the next try, if there is one.
        """
        waited = await self._count(plan.is_refused(error), pause)
        if waited is None:
            return True
        over = await self._over(waited)
        return await self._ends(error, plan.ends_model(error, self._times[seq_id], waited, over))

    async def ends_with_restore(self, error: TinsmithError, pause: float) -> bool:
        """The same of a model that its trainer could not bring back."""
        if not plan.tried_in_vain(error):
            return False
        waited = await self._count(plan.is_snapshot_missing(error), pause)
        if waited is None:
            return True
        over = await self._over(waited)
        return await self._ends(error, plan.loses_snapshot(error, waited, over))

    async def _count(self, refused: bool, pause: float) -> InVain | None:
        IN_VAIN.inc()
        # A trainer that starts anew is asked before the pause is over.
        now = asyncio.get_running_loop().time()
        waited = min(self._pause, now - self._tried)
        self._tried, self._pause = now, pause
        counted = await self._journal.tried_in_vain(self._lease.model_id, self._lease.epoch, waited, refused)
        if counted is None:
            self._lease.lose()
        return counted

    async def _over(self, waited: InVain) -> bool:
        """Whether nobody can miss the model, where that is worth asking."""
        return plan.gives_up(waited, over=True) and await self._session_finished(self._lease.model_id)

    async def _ends(self, error: TinsmithError, lost: bool) -> bool:
        """Has all operations of a model that is lost fail, and say so."""
        if not lost:
            return False
        model_id = self._lease.model_id
        LOST.inc()
        log.error("model %s is lost: %s", model_id, error.message)
        reason = Internal(
            f"the state of model {model_id} is lost ({error.message}); create a model from its last "
            "checkpoint with load_state",
            "model_lost",
        )
        index = await self._journal.index(model_id, -1, entries=0)
        await self._publisher.close_model(index.lowest_pending, error_result(errors.to_pb(reason)))
        return True
