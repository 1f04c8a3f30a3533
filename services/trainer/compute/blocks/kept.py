"""How many blocks of a micro-batch keep their activations: as many as there is memory for.

To compute a block again takes as long as to compute it, which is a third of what a frozen model's forward and
backward pass take in all.

Invariant: a choice fails no operation. What lacks memory with blocks that keep theirs runs again, and fewer
of them do from then on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from services.trainer.compute.blocks.checkpointing import Blocks
from services.trainer.compute.memory.capacity import GIB, Footprint, head_bytes

log = logging.getLogger(__name__)

_MARGIN = 1 / 8
"""Of what is free, which the arithmetic may miss."""
_LEAST = 1 / 8
"""Of what is free, below which nothing is kept any more."""


class KeptBlocks:
    """Chooses for one model's micro-batches.

    Args:
        footprint: of the model where all blocks compute theirs again.
        room: bytes that this rank may yet take.

    Attributes:
        bytes: that blocks kept, of the micro-batch that was computed last.
    """

    def __init__(
        self, blocks: Blocks, footprint: Footprint, vocab_size: int, room: Callable[[], int]
    ) -> None:
        self._blocks, self._footprint, self._vocab_size, self._room = blocks, footprint, vocab_size, room
        self.bytes = 0
        self._share = 1.0
        self._last = 0

    @contextmanager
    def keeping(self, tokens: int) -> Iterator[None]:
        """Within it a micro-batch of so many tokens is computed, forward and backward."""
        room = int(self._share * self._room())
        self._last = fitting(tokens, self._blocks.count, self._footprint, self._vocab_size, room)
        self._blocks.kept = self._last
        self.bytes = int(self._last * tokens * self._footprint.block)
        try:
            yield
            self._last = 0
        finally:
            self._blocks.kept = 0

    def gives_way(self) -> bool:
        """Whether the last micro-batch, which lacked memory, kept more than it had to. If it runs again, and
        in those after it, fewer blocks do."""
        if not self._last:
            return False
        self._share = self._share / 2 if self._share > _LEAST else 0.0
        log.warning(
            "a micro-batch whose last %d blocks kept their activations was refused memory and runs again; "
            "from now on they are kept in %.0f%% of what is free (%.1f GiB now)",
            self._last,
            100 * self._share,
            self._room() / GIB,
        )
        self._last = 0
        return True


def fitting(tokens: int, blocks: int, footprint: Footprint, vocab_size: int, room: int) -> int:
    """How many of so many blocks may keep their activations of a micro-batch within `room` bytes. Pure."""
    if not footprint.block:
        return 0
    left = room * (1 - _MARGIN) - tokens * footprint.token - head_bytes(tokens, vocab_size)
    return max(0, min(blocks, int(left / (tokens * footprint.block))))
