"""How tokens of operations come to be spread over ranks: the trainer's own decisions, without a trainer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.trainer.order.microbatch import deal, deals_on, split_operation
from services.trainer.order.scheduler import Cursor, Limits, NextPass, QueuedOp, plan_next


def passes(tenants: Sequence[Sequence[int]], ranks: int, micro_batch: int) -> list[list[int]]:
    """Tokens that each rank computes of one operation of each tenant, pass by pass.

    Args:
        tenants: of each the lengths of its datums.
        micro_batch: tokens.
    """
    queues = {}
    for number, lengths in enumerate(tenants):
        data = [np.full(length, index, "<i4").tobytes() for index, length in enumerate(lengths)]
        units = split_operation(data, micro_batch, shared=True, ranks=ranks)
        queues[str(number)] = [QueuedOp(1, tuple(units))]
    computed: list[list[int]] = []
    dealt: dict[str, list[int]] = {}
    """What ranks were dealt of the models that go on where their last pass ended."""
    cursor = Cursor()
    while True:
        decision, cursor = plan_next(queues, Limits(ranks, micro_batch), cursor)
        if decision is None:
            return computed
        assert isinstance(decision, NextPass)
        sizes = []
        for batch in decision.micro_batches:
            sizes.append(0)
            for ref in batch:
                op = queues[ref.model_id][0]
                assert op.units is not None
                op.next_unit = max(op.next_unit, ref.unit + 1)
                sizes[-1] += op.units[ref.unit].tokens
        alone = deals_on({ref.model_id for batch in decision.micro_batches for ref in batch}, trains=True)
        own = [0] * ranks if alone is None else dealt.setdefault(alone, [0] * ranks)
        computed.append([sum(sizes[batch] for batch in batches) for batches in deal(sizes, own)])


def loads(computed: Sequence[Sequence[int]]) -> list[int]:
    """Tokens of each rank in all of these passes."""
    return [sum(of_rank) for of_rank in zip(*computed, strict=True)]


def busy(computed: Sequence[Sequence[int]]) -> float:
    """Share of the time of these passes in which ranks compute: each takes as long as its busiest rank."""
    return float(np.mean(loads(computed))) / sum(map(max, computed))
