"""The checksum of weights: of the bytes alone, however they come, and of what accidents make of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from services.common import weights
from services.common.weights import checksums
from services.common.weights.checksums import Checksum

BLOCK_BYTES = 65536 * 4
MASK = 2**64 - 1


def random_bytes(size: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def by_the_book(data: bytes) -> int:
    """As the module's text defines it, in integers without bounds."""

    def factor(place: int) -> int:
        bits = (place + 1) * 0x9E3779B97F4A7C15 & MASK
        bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & MASK
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & MASK
        return (bits ^ bits >> 31) | 1

    whole = data + bytes(-len(data) % 4)
    total = len(data) * 0xAF251AF3B0F025B5
    for number in range(len(whole) // 4):
        word = int.from_bytes(whole[4 * number : 4 * number + 4], "little", signed=True)
        block, place = divmod(number, 65536)
        total += word * factor(place) * pow(0xD1342543DE82EF95, block, 2**64)
    return total & MASK


@pytest.mark.parametrize("size", [0, 1, 4, 4097, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 6])
def test_it_is_what_its_definition_says(size: int) -> None:
    buffer = random_bytes(size)
    assert weights.checksum(buffer) == by_the_book(buffer.numpy().tobytes())


@pytest.mark.parametrize("at_once", [1, 3, 64])
def test_it_does_not_depend_on_how_much_is_computed_at_once(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = random_bytes(7 * BLOCK_BYTES + 12)
    expected = weights.checksum(buffer)
    monkeypatch.setitem(checksums._AT_ONCE, "cpu", at_once)
    assert weights.checksum(buffer) == expected


@pytest.mark.parametrize("piece", [4, 1000, BLOCK_BYTES - 4, BLOCK_BYTES, 3 * BLOCK_BYTES + 8])
def test_it_does_not_depend_on_the_pieces_or_their_order(piece: int) -> None:
    buffer = random_bytes(min(200 * piece, 9 * BLOCK_BYTES) + 3)
    whole = Checksum()
    for start in reversed(range(0, buffer.numel(), piece)):
        whole.add(buffer[start : start + piece], start)
    assert whole.value(buffer.numel()) == weights.checksum(buffer)


def test_a_piece_that_begins_within_a_word_is_refused() -> None:
    with pytest.raises(ValueError, match="within a word"):
        Checksum().add(torch.zeros(4, dtype=torch.uint8), 6)


def test_where_a_piece_lies_in_memory_does_not_matter() -> None:
    buffer = random_bytes(BLOCK_BYTES + 10)
    for shift in range(1, 5):
        moved = torch.cat([torch.zeros(shift, dtype=torch.uint8), buffer])[shift:]
        assert weights.checksum(moved) == weights.checksum(buffer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int32])
def test_the_bytes_count_and_not_the_type_that_they_are_seen_as(dtype: torch.dtype) -> None:
    buffer = random_bytes(4096)
    tensors = {"w": buffer.view(dtype).view(4, -1)}
    assert weights.stream_checksum(tensors) == weights.checksum(buffer)


def flips() -> Iterator[tuple[int, int]]:
    """A byte and a bit of it: all bits of a word, and the highest one of many."""
    yield from ((place, bit) for place in range(4) for bit in range(8))
    yield from ((place, 7) for place in range(7, 2 * BLOCK_BYTES, 37_600))
    yield from ((place, 7) for place in (BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 3))


@pytest.mark.parametrize("content", ["random", "zeros"])
def test_every_flipped_bit_is_seen(content: str) -> None:
    size = 2 * BLOCK_BYTES
    buffer = random_bytes(size) if content == "random" else torch.zeros(size, dtype=torch.uint8)
    seen = {weights.checksum(buffer)}
    for number, (place, bit) in enumerate(flips(), start=2):
        buffer[place] ^= 1 << bit
        seen.add(weights.checksum(buffer))
        buffer[place] ^= 1 << bit
        assert len(seen) == number


def swapped(values: Tensor, first: slice, second: slice) -> Tensor:
    found = values.clone()
    found[first], found[second] = values[second], values[first]
    return found


def weight() -> Tensor:
    """float32 [5 * 65536]."""
    return torch.randn(5 * 65536, generator=torch.Generator().manual_seed(1))


ACCIDENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "two neighbours swapped": lambda w: swapped(w, slice(7, 8), slice(8, 9)),
    "two elements swapped at equal places of blocks": lambda w: swapped(
        w, slice(9, 10), slice(65536 + 9, 65536 + 10)
    ),
    "two blocks swapped": lambda w: swapped(w, slice(0, 65536), slice(2 * 65536, 3 * 65536)),
    "parts of two blocks swapped": lambda w: swapped(w, slice(16, 4096), slice(65536 + 16, 65536 + 4096)),
    "rows swapped": lambda w: swapped(w.view(-1, 64), slice(1, 2), slice(5, 6)),
    "all moved by an element": lambda w: w.roll(1),
    "all moved by a block": lambda w: w.roll(65536),
    "turned round": lambda w: w.flip(0),
    "transposed": lambda w: w.view(64, -1).T.contiguous(),
    "a range zeroed": lambda w: torch.cat([w[:1000], torch.zeros(300), w[1300:]]),
    "a bucket zeroed": lambda w: torch.cat([w[:65536], torch.zeros(65536), w[2 * 65536 :]]),
    "a block written twice": lambda w: torch.cat([w[:65536], w[:65536], w[2 * 65536 :]]),
    "all zeroed": torch.zeros_like,
    "cut short": lambda w: w[:-1],
    "cut by a block": lambda w: w[:-65536],
    "made longer": lambda w: torch.cat([w, torch.zeros(4)]),
    "one sign": lambda w: torch.cat([-w[:1], w[1:]]),
    "two signs": lambda w: torch.cat([-w[:2], w[2:]]),
    "all signs": torch.neg,
    "rounded to another type": lambda w: w.to(torch.bfloat16).float(),
    "of another type": lambda w: w.to(torch.bfloat16),
    "of a wider type": lambda w: w.double(),
}


def test_accidents_are_seen_and_told_from_each_other() -> None:
    found = {"": weight(), **{name: change(weight()) for name, change in ACCIDENTS.items()}}
    sums = {name: weights.checksum(values.view(-1).view(torch.uint8)) for name, values in found.items()}
    assert len(set(sums.values())) == len(sums), sums


def test_signs_that_change_places_are_seen() -> None:
    # Differences of 2^31 alone are the least that it sees of what changes in two words.
    signs = torch.ones(2 * 65536)
    signs[::3] = -1
    same = weights.checksum(signs.view(torch.uint8))
    for first, second in [(0, 1), (0, 65537), (3, 65536), (1, 65538)]:
        assert signs[first] != signs[second]
        moved = swapped(signs, slice(first, first + 1), slice(second, second + 1))
        assert weights.checksum(moved.view(torch.uint8)) != same


def test_zeros_of_another_length_are_other_bytes() -> None:
    sums = {
        weights.checksum(torch.zeros(size, dtype=torch.uint8)) for size in (0, 1, 4, 16, 4096, BLOCK_BYTES)
    }
    assert len(sums) == 6
