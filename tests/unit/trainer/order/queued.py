"""Queues of operations as the scheduler sees them, and what is decided of them."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from services.trainer.order.microbatch import Unit
from services.trainer.order.scheduler import Cursor, Limits, NextControlOp, NextPass, QueuedOp, plan_next

ONE_BATCH = Limits(micro_batches=1, micro_batch_tokens=64)
TWO_BATCHES = Limits(micro_batches=2, micro_batch_tokens=64)


def forward(seq_id: int, *shapes: tuple[int, int]) -> QueuedOp:
    """An operation with one unit per (datums, tokens of each)."""
    units = tuple(Unit(tuple(range(datums)), datums * length) for datums, length in shapes)
    return QueuedOp(seq_id, units)


def control(seq_id: int) -> QueuedOp:
    return QueuedOp(seq_id, None)


def refs(decision: object) -> list[list[tuple[str, int, int]]]:
    assert isinstance(decision, NextPass)
    return [[(r.model_id, r.seq_id, r.unit) for r in batch] for batch in decision.micro_batches]


def drive(
    queues: dict[str, list[QueuedOp]], limits: Limits, steps: int, alone: Set[str] = frozenset()
) -> list[object]:
    """Applies decisions as the executor does and returns them."""
    cursor, made = Cursor(), []
    for _ in range(steps):
        decision, cursor = plan_next(queues, limits, cursor, alone)
        if decision is None:
            break
        made.append(decision)
        if isinstance(decision, NextControlOp):
            assert queues[decision.model_id].pop(0).seq_id == decision.seq_id
            continue
        for ref in (ref for batch in decision.micro_batches for ref in batch):
            op = next(op for op in queues[ref.model_id] if op.seq_id == ref.seq_id)
            assert op.next_unit == ref.unit
            op.next_unit += 1
        for queue in queues.values():
            while queue and queue[0].units is not None and queue[0].next_unit == len(queue[0].units):
                queue.pop(0)
    return made


def forward_only(seq_id: int, *shapes: tuple[int, int]) -> QueuedOp:
    return replace(forward(seq_id, *shapes), forward_only=True)
