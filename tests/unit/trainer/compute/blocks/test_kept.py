"""How many blocks keep their activations in what memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.trainer.compute.blocks.checkpointing import Blocks
from services.trainer.compute.blocks.kept import KeptBlocks, fitting
from services.trainer.compute.memory.capacity import Footprint, head_bytes

TOKENS, BLOCKS, VOCABULARY = 1000, 36, 64
FOOTPRINT = Footprint(weights=0, token=300.0, block=200.0)


def room_of(blocks: float) -> int:
    """Bytes in which so many blocks keep theirs, the margin included."""
    needed = TOKENS * (FOOTPRINT.token + blocks * FOOTPRINT.block) + head_bytes(TOKENS, VOCABULARY)
    return int(needed * 8 / 7)


@pytest.mark.parametrize(
    ("room", "kept"),
    [
        (-1, 0),
        (0, 0),
        (room_of(0.99), 0),
        (room_of(1.01), 1),
        (room_of(20.5), 20),
        (room_of(36.5), 36),
        (room_of(360), 36),
    ],
)
def test_as_many_blocks_keep_theirs_as_fit_beside_what_a_micro_batch_takes_anyway(
    room: int, kept: int
) -> None:
    assert fitting(TOKENS, BLOCKS, FOOTPRINT, VOCABULARY, room) == kept


def test_what_grows_with_the_square_of_the_tokens_is_not_kept() -> None:
    assert fitting(TOKENS, BLOCKS, replace(FOOTPRINT, block=0.0), VOCABULARY, 2**60) == 0


def test_what_lacked_memory_keeps_less_and_in_the_end_nothing() -> None:
    blocks = Blocks(BLOCKS)
    chosen = KeptBlocks(blocks, FOOTPRINT, VOCABULARY, lambda: room_of(36.5))
    kept = []
    for _ in range(6):
        with pytest.raises(MemoryError), chosen.keeping(TOKENS):
            kept.append(blocks.kept)
            raise MemoryError
        assert blocks.kept == 0
        if not chosen.gives_way():
            break
    assert kept[0] == BLOCKS and kept[-1] == 0 == chosen.bytes
    assert kept == sorted(kept, reverse=True)


def test_a_lack_of_memory_after_a_micro_batch_that_fitted_is_not_laid_to_what_that_kept() -> None:
    chosen = KeptBlocks(Blocks(BLOCKS), FOOTPRINT, VOCABULARY, lambda: room_of(36.5))
    with chosen.keeping(TOKENS):
        pass
    assert not chosen.gives_way()
