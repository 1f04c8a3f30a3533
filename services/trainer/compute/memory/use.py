"""What a rank's memory is for at present, by the arithmetic of what it can hold. Pure.

Models that train all weights are not counted, as nowhere in that arithmetic.
"""

from __future__ import annotations

from services.trainer.compute.data import MicroBatch, Pass
from services.trainer.compute.memory.capacity import (
    ADAPTER_GRADIENTS,
    ADAPTER_MOMENTS,
    Capacity,
    Footprint,
    adapter_element_bytes,
    head_bytes,
    needed,
)


def pass_bytes(work: Pass, footprint: Footprint, vocab_size: int, ranks: int) -> int:
    """What the largest micro-batch of a pass takes of a rank; what only runs forward keeps nothing."""

    def taken(batch: MicroBatch) -> int:
        lengths = [row.length for row in batch.rows if not work.ops[row.op].forward_only]
        if batch.split:
            return max((needed(footprint, length, vocab_size, ranks) for length in lengths), default=0)
        return int(sum(map(footprint.of_one, lengths))) + head_bytes(sum(lengths), vocab_size)

    return max(map(taken, work.micro_batches), default=0)


def largest_pass_bytes(
    footprint: Footprint, found: Capacity, vocab_size: int, micro_batch_tokens: int, ranks: int
) -> int:
    """What the largest micro-batch that is let in takes of a rank.

    Args:
        ranks: that can compute a sequence together; 1 = each is computed by one.
    """
    tokens = max(found.one_rank_tokens, micro_batch_tokens)
    alone = int(footprint.of_one(tokens)) + head_bytes(tokens, vocab_size)
    return max(alone, needed(footprint, found.sequence_tokens, vocab_size, ranks) if ranks > 1 else 0)


def by_purpose(footprint: Footprint, adapters: int, item: int, ranks: int, in_pass: int) -> dict[str, float]:
    """Bytes of a rank by what they are for.

    Args:
        adapters: that adapters take, gradients and moments included.
        item: bytes of an element of the base model.
        ranks: that share each adapter's optimizer.
        in_pass: that a pass takes beside.
    """
    of_all, of_part = adapter_element_bytes(item)
    elements = adapters / (of_all + of_part / ranks)
    gradients, moments = 4 * ADAPTER_GRADIENTS * elements, 4 * ADAPTER_MOMENTS * elements / ranks
    return {
        "weights": footprint.weights,
        "adapters": adapters - gradients - moments,
        "gradients": gradients,
        "moments": moments,
        "pass": in_pass,
    }
