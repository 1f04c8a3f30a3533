"""Writing down what operations came to.

Invariants: what an operation gives rise to is recorded before its future is resolved; both are tried
until they are done or the lease is lost, and the next holder of the lease does them again. Nobody is told a
result before it is written, but of what only ran forward, while nobody else can resolve its future.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from prometheus_client import Counter
from redis.exceptions import RedisError

from services.common.contract import errors, ids
from services.common.process import failpoints
from services.common.state.journal import Journal, UnreadableOperation
from services.common.state.journal_records import Published, error_result
from services.common.state.poison import Poison, Unreadable
from services.common.telemetry.repeats import Repeats
from services.gateway.dispatch import plan
from services.gateway.dispatch.leases import Lease
from services.gateway.dispatch.used import event_of, used_by
from services.gateway.results.futures import Futures
from services.gateway.timelines.timelines import Timelines
from tinsmith.internal.v1 import operation_pb2
from tinsmith.v1 import results_pb2

FENCED = Counter(
    "tinsmith_fenced_writes_total", "Results that were not written, because another gateway leads the model"
)

OnResult = Callable[
    [operation_pb2.Operation, results_pb2.OperationResult], Awaitable[results_pb2.OperationResult]
]


class ResultPublisher:
    """Writes the results of one model's operations under one lease.

    Args:
        on_result: records what a result gives rise to, and says what the operation comes to by that; may be
            called again for the same operation.
        futures: has those who wait for the results on this gateway.
        timelines: are told of what was published.
        unwritten: tells of those that cannot be written, of all models.

    Attributes:
        writing: seq_ids whose results are being written.
    """

    def __init__(
        self,
        lease: Lease,
        journal: Journal,
        on_result: OnResult,
        futures: Futures,
        poison: Poison,
        timelines: Timelines,
        unwritten: Repeats,
    ) -> None:
        self._poison = poison
        self._timelines = timelines
        self._futures = futures
        self._lease = lease
        self._journal = journal
        self._on_result = on_result
        self._unwritten = unwritten
        self.writing: set[int] = set()

    def expect(self, seq_id: int) -> None:
        """A trainer has an operation whose result is not known: who waits for it here need not look."""
        self._futures.expect(ids.request_id(self._lease.model_id, seq_id))

    def expect_no_longer(self, seq_id: int) -> None:
        """Its call is over."""
        self._futures.expect_no_longer(ids.request_id(self._lease.model_id, seq_id))

    async def publish(self, operation: operation_pb2.Operation, result: results_pb2.OperationResult) -> None:
        """Writes one result."""
        self.writing.add(operation.seq_id)
        try:
            attempt = 0
            while not self._lease.lost:
                try:
                    await failpoints.reach("gateway.before_record")
                    recorded = await self._record(operation, result)
                    await failpoints.reach("gateway.before_publish")
                    await self._publish(operation, recorded)
                    await failpoints.reach("gateway.after_publish")
                    self._unwritten.over(operation.model_id)
                    return
                except (RedisError, OSError) as error:
                    attempt += 1
                    self._unwritten.failed(operation.model_id, error)
                    await asyncio.sleep(plan.backoff(attempt))
        finally:
            self.writing.discard(operation.seq_id)

    async def _record(
        self, operation: operation_pb2.Operation, result: results_pb2.OperationResult
    ) -> results_pb2.OperationResult:
        try:
            return await self._on_result(operation, result)
        except Unreadable as error:
            # Nothing that is done again would have it read.
            return results_pb2.OperationResult(error=errors.to_pb(error))

    async def close_model(self, seq_id: int, closing: bytes) -> None:
        """Fails a pending operation and every later one with the same serialized OperationResult."""
        lease = self._lease
        with suppress(UnreadableOperation):
            (operation,) = await self._journal.operations(lease.model_id, [seq_id])
            if operation is not None:
                await self._record(operation, results_pb2.OperationResult.FromString(closing))
        outcome = await self._journal.publish(lease.model_id, lease.epoch, seq_id, closing, closing=closing)
        self._note(outcome)

    async def fail_pending(self, closing: bytes) -> int:
        """Fails the next operations that wait with the same serialized OperationResult; the last of their
        seq_ids, -1 = nothing waits."""
        model_id, last = self._lease.model_id, -1
        lowest = await self._journal.lowest_pending(model_id)
        for entry in (await self._journal.index(model_id, lowest - 1)).entries:
            if not entry.pending:
                continue
            last = entry.seq_id
            try:
                (operation,) = await self._journal.operations(model_id, [last])
            except UnreadableOperation as error:
                await self.fail_unreadable(last, error)
                continue
            if operation is not None and not self._lease.lost:
                await self.publish(operation, results_pb2.OperationResult.FromString(closing))
        return last

    async def fail_unreadable(self, seq_id: int, error: Unreadable) -> None:
        """Fails a pending operation that cannot be read; with a model's creation, all that follow."""
        self._poison.note(error.name, error.reason)
        lease, result = self._lease, error_result(errors.to_pb(error))
        closing = result if seq_id == 0 else b""
        outcome = await self._journal.publish(
            lease.model_id, lease.epoch, seq_id, result, replay_passes_over=True, closing=closing
        )
        self._note(outcome)

    async def _publish(self, operation: operation_pb2.Operation, result: results_pb2.OperationResult) -> None:
        payload = result.SerializeToString()
        told_first = self._lease.surely_held and plan.may_be_told_first(operation, result)

        async def write() -> Published:
            if told_first:
                await failpoints.reach("gateway.after_tell")
            return await self._journal.publish(
                operation.model_id,
                self._lease.epoch,
                operation.seq_id,
                payload,
                replay_passes_over=plan.replay_passes_over(operation, result),
                closing=plan.closing_result(operation, result),
                use=used_by(operation, result),
            )

        request_id = ids.request_id(operation.model_id, operation.seq_id)
        outcome = await self._futures.resolve(request_id, payload, write, told_first)
        self._note(outcome)
        if outcome is Published.PUBLISHED:
            self._timelines.note(operation.origin.owner, event_of(operation, result, time.time()))

    def _note(self, outcome: Published) -> None:
        if outcome is Published.STALE_EPOCH:
            FENCED.inc()
            self._lease.lose()
