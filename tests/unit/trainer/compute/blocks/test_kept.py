"""How many blocks keep their activations in what memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from services.trainer.compute.blocks.checkpointing import Blocks
from services.trainer.compute.blocks.kept import KeptBlocks, fitting
from services.trainer.compute.memory.capacity import PROCESS_BYTES, Footprint, head_bytes

TOKENS, BLOCKS, VOCABULARY = 1000, 36, 64
FOOTPRINT = Footprint(weights=0, token=300.0, block=200.0)


def room_of(blocks: float) -> int:
    """Bytes in which so many blocks keep theirs, the margin included."""
    needed = TOKENS * (FOOTPRINT.token + blocks * FOOTPRINT.block) + head_bytes(TOKENS, VOCABULARY)
    return int((needed + PROCESS_BYTES) * 8 / 7)


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


def refused(chosen: KeptBlocks, blocks: Blocks, error: type[Exception] = torch.OutOfMemoryError) -> int:
    """How many blocks keep theirs of a micro-batch that fails."""
    with pytest.raises(error), chosen.keeping(TOKENS):
        kept = blocks.kept
        raise error
    assert blocks.kept == 0
    return kept


def test_what_lacked_memory_keeps_half_as_many_and_in_the_end_none() -> None:
    blocks = Blocks(BLOCKS)
    chosen = KeptBlocks(blocks, FOOTPRINT, VOCABULARY, lambda: room_of(360))
    kept = [refused(chosen, blocks)]
    while chosen.gives_way():
        kept.append(refused(chosen, blocks))
    assert kept == [36, 18, 9, 4, 2, 1, 0]
    assert chosen.bytes == 0


def test_after_many_that_fitted_more_blocks_keep_theirs_again() -> None:
    blocks = Blocks(BLOCKS)
    chosen = KeptBlocks(blocks, FOOTPRINT, VOCABULARY, lambda: room_of(360))
    while refused(chosen, blocks):
        assert chosen.gives_way()
    kept = []
    for _ in range(256 * 8):
        with chosen.keeping(TOKENS):
            kept.append(blocks.kept)
    assert list(dict.fromkeys(kept)) == [0, 1, 2, 4, 8, 16, 32, 36]


def test_micro_batches_that_had_no_room_for_more_do_not_say_that_more_fit() -> None:
    blocks, room = Blocks(BLOCKS), [room_of(360)]
    chosen = KeptBlocks(blocks, FOOTPRINT, VOCABULARY, lambda: room[0])
    assert refused(chosen, blocks) == 36 and chosen.gives_way()
    for room[0] in (room_of(3.5), room_of(360)):
        for _ in range(255):
            with chosen.keeping(TOKENS):
                assert blocks.kept == (3 if room[0] < room_of(4) else 18)
    with chosen.keeping(TOKENS):
        pass
    with chosen.keeping(TOKENS):
        assert blocks.kept == 36


def test_what_the_largest_micro_batch_took_is_counted() -> None:
    chosen = KeptBlocks(Blocks(BLOCKS), FOOTPRINT, VOCABULARY, lambda: room_of(20.5))
    for tokens in (TOKENS, TOKENS // 2):
        with chosen.keeping(tokens):
            pass
    assert chosen.bytes == TOKENS * (300 + 20 * 200) + head_bytes(TOKENS, VOCABULARY)


def test_a_lack_of_memory_elsewhere_is_not_laid_to_blocks_that_kept_theirs() -> None:
    blocks = Blocks(BLOCKS)
    chosen = KeptBlocks(blocks, FOOTPRINT, VOCABULARY, lambda: room_of(36.5))
    with chosen.keeping(TOKENS):
        pass
    assert not chosen.gives_way()
    assert refused(chosen, blocks, ValueError) == BLOCKS
    assert not chosen.gives_way()
