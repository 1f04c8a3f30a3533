"""What the executor measures of operations and passes.

Invariant: an operation that ran is counted once when it begins and once when it ends.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from prometheus_client import Counter, Histogram

from services.common.telemetry import tracing
from services.common.telemetry.metrics import LONG_S
from services.trainer.compute.data import Pass
from services.trainer.convert import Forward
from services.trainer.execution.resident_models import Operation, OperationResult

SECONDS = Histogram(
    "tinsmith_operation_seconds",
    "Operations, from their arrival at the trainer to their result",
    ["kind", "outcome"],
    buckets=LONG_S,
)
PASS_SECONDS = Histogram("tinsmith_pass_seconds", "Forward and backward passes of the world", buckets=LONG_S)
PASS_TOKENS = Histogram(
    "tinsmith_micro_batch_tokens",
    "Tokens a micro-batch computes",
    buckets=[4**power for power in range(2, 10)],
)
TOKENS = Counter("tinsmith_passed_tokens_total", "Tokens of the data that passes were for", ["direction"])
WAITED = Histogram(
    "tinsmith_operation_wait_seconds",
    "Operations, from their arrival at the trainer to their begin",
    ["kind", "owner_class"],
    buckets=LONG_S,
)


def kind_of(operation: Operation) -> str:
    """What an operation is, in a word."""
    work = operation.work
    if isinstance(work, Forward):
        return "forward" if work.forward_only else "forward_backward"
    return type(work).__name__.lower()


def passed(operations: Sequence[Operation], plan: Pass, computed: list[int], since: float) -> None:
    """Counts a pass for these operations, which began then and whose batches computed so many tokens."""
    PASS_SECONDS.observe(time.monotonic() - since)
    for tokens, batch in zip(computed, plan.micro_batches, strict=True):
        PASS_TOKENS.observe(tokens)
        for row in batch.rows:
            direction = "forward" if plan.ops[row.op].forward_only else "forward_backward"
            TOKENS.labels(direction).inc(row.length)
    about = {"tokens": sum(computed), "shared_by": len(operations)}
    for operation in operations:
        tracing.record("pass of the world", operation.subject, since, **about)


def began(operation: Operation) -> None:
    """Counts an operation that begins."""
    WAITED.labels(kind_of(operation), operation.owner_class).observe(time.monotonic() - operation.admitted)


def ended(operation: Operation, result: OperationResult) -> None:
    """Counts an operation that has its result."""
    outcome = "failed" if result.HasField("error") else "done"
    SECONDS.labels(kind_of(operation), outcome).observe(time.monotonic() - operation.admitted)
    tracing.record(kind_of(operation), operation.subject, operation.admitted, outcome=outcome)
