"""How many blocks of a micro-batch keep their activations: as many as there is memory for.

To compute a block again takes as long as to compute it, which is a third of what a frozen model's forward and
backward pass take in all.

Invariant: a choice fails no operation. What lacks memory with blocks that keep theirs runs again with at most
half as many, and so does what comes after it, until many micro-batches that kept so many have fitted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import Counter

from services.trainer.compute.blocks.checkpointing import Blocks
from services.trainer.compute.memory.capacity import PROCESS_BYTES, Footprint, head_bytes
from services.trainer.compute.memory.failures import is_out_of_memory

log = logging.getLogger(__name__)

RERUNS = Counter(
    "tinsmith_micro_batch_reruns_total",
    "Times that a micro-batch was refused memory on the first rank and ran again with fewer blocks kept",
)

_MARGIN = 1 / 8
"""Of what is free, which the arithmetic may miss."""
_FITTED = 256
"""Micro-batches with as many blocks as may keep theirs, after which twice as many may."""


class KeptBlocks:
    """Chooses for one model's micro-batches.

    Args:
        footprint: of the model where all blocks compute theirs again.
        room: bytes that this rank may yet take.

    Attributes:
        bytes: that one micro-batch took at most, as it was counted, since that was last set to 0.
    """

    def __init__(
        self, blocks: Blocks, footprint: Footprint, vocab_size: int, room: Callable[[], int]
    ) -> None:
        self.bytes = 0
        self._blocks, self._footprint, self._vocab_size, self._room = blocks, footprint, vocab_size, room
        self._most = blocks.count
        self._fitted = self._refused = 0

    @contextmanager
    def keeping(self, tokens: int) -> Iterator[None]:
        """Within it a micro-batch of so many tokens is computed, forward and backward."""
        kept = fitting(tokens, self._most, self._footprint, self._vocab_size, self._room())
        self._blocks.kept = kept
        try:
            yield
        except Exception as error:
            self._refused = kept if is_out_of_memory(error) else 0
            raise
        finally:
            self._blocks.kept = 0
        taken = tokens * (self._footprint.token + kept * self._footprint.block)
        self.bytes = max(self.bytes, int(taken) + head_bytes(tokens, self._vocab_size))
        # Where there was no room for more, nothing is said of whether more fits.
        self._fitted += kept == self._most
        if self._fitted >= _FITTED:
            self._most, self._fitted = min(self._blocks.count, max(1, 2 * self._most)), 0

    def gives_way(self) -> bool:
        """After a lack of memory: whether blocks kept what they had not to. Then at most half as many do, if
        the micro-batch runs again and from then on."""
        refused, self._refused = self._refused, 0
        if not refused:
            return False
        RERUNS.inc()
        self._most, self._fitted = refused // 2, 0
        log.warning(
            "a micro-batch whose last %d blocks kept their activations was refused memory and runs again; "
            "at most %d do now, until many micro-batches have fitted so",
            refused,
            self._most,
        )
        return True


def fitting(tokens: int, blocks: int, footprint: Footprint, vocab_size: int, room: int) -> int:
    """How many of so many blocks may keep their activations of a micro-batch within `room` bytes. Pure."""
    if not footprint.block:
        return 0
    left = room * (1 - _MARGIN) - PROCESS_BYTES - tokens * footprint.token - head_bytes(tokens, vocab_size)
    return max(0, min(blocks, int(left / (tokens * footprint.block))))
