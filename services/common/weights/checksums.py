"""The checksum of a stream of bytes, computed where they lie: in a device's memory or in the host's.

The stream is read as 32-bit little-endian words w(0), w(1) .. taken as signed, the last one filled up with
zero bytes. Word i, which is word j of block b (b = i div 65536, j = i mod 65536), counts with the odd 64-bit
factor t(j) * K^b, where t(j) is the SplitMix64 finalizer of (j + 1) * 0x9E3779B97F4A7C15, made odd:

    checksum = sum of w(i) * t(j) * K^b  +  length in bytes * L        (mod 2^64)

Integer products and sums wrap alike on every device, whatever order they are added in, so the result depends
on the bytes alone: not on the device, on their element type, or on the pieces that they come in.

Invariant: no change within one word goes unseen. Words differ by less than 2^32, and all factors are odd, so
the product of both is never 0 mod 2^64. What changes in several words (swaps, shifts, ranges of zeros) meets
factors that have nothing to do with each other, and passes with a chance of 2^-63; of 2^-32, as with CRC-32,
if every difference is 2^31, as of a float32 tensor whose signs are flipped. Two words that change places with
each other, at equal places of blocks less than 2^30 apart, never pass: K is 5 mod 8, so K^n - 1 has only two
factors 2 more than n. It finds accidents. It is no signature: who wants to can make two streams with one sum.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

WORD_BYTES = 4
_BLOCK = 1 << 16
_AT_ONCE = {"cpu": 4, "cuda": 32}
"""Blocks that are multiplied at once, by the kind of device: the products take twice their bytes, and stay in
a CPU's cache."""

_BITS = 2**64
_GOLDEN = 0x9E3779B97F4A7C15
_K = 0xD1342543DE82EF95
_L = 0xAF251AF3B0F025B5


class Checksum:
    """Of a stream that comes in pieces, in any order."""

    def __init__(self) -> None:
        self._sum = 0

    def add(self, piece: Tensor, offset: int) -> None:
        """Counts a piece in. Blocking; on CUDA what it does is on the current stream.

        Args:
            piece: its bytes, uint8 [n], on any device.
            offset: of its first byte in the stream.

        Raises:
            ValueError: it begins within a word.
        """
        if offset % WORD_BYTES:
            raise ValueError(f"a piece begins at byte {offset}, within a word")
        step = _AT_ONCE[piece.device.type] * _BLOCK * WORD_BYTES
        # The first one ends with its block, so that all others begin with one.
        first = min(-offset % (_BLOCK * WORD_BYTES), piece.numel())
        found = [_weighed(piece[:first], offset)] if first else []
        found += [
            _weighed(piece[start : start + step], offset + start)
            for start in range(first, piece.numel(), step)
        ]
        if found:
            self._sum += int(torch.stack(found).sum())

    def value(self, size: int) -> int:
        """The checksum, 0 .. 2^64 - 1, of the stream of `size` bytes whose pieces were added."""
        return (self._sum + size * _L) % _BITS


def checksum(buffer: Tensor) -> int:
    """The checksum of a uint8 buffer's bytes, 0 .. 2^64 - 1. Blocking."""
    whole = Checksum()
    whole.add(buffer, 0)
    return whole.value(buffer.numel())


def _weighed(piece: Tensor, offset: int) -> Tensor:
    """What a piece adds to the sum, int64 []. One that begins within a block ends in it."""
    factors, powers = _tables(piece.device)
    block, start = divmod(offset // WORD_BYTES, _BLOCK)
    words = _words(piece)
    if start or words.numel() < _BLOCK:
        inner = (words.to(torch.int64).mul_(factors[start : start + words.numel()])).sum()
        return inner * _power(block)
    whole = words.numel() // _BLOCK
    blocks = words[: whole * _BLOCK].view(whole, _BLOCK).to(torch.int64).mul_(factors).sum(1)
    found = (blocks * powers[:whole]).sum() * _power(block)
    rest = piece[whole * _BLOCK * WORD_BYTES :]
    return found + _weighed(rest, offset + whole * _BLOCK * WORD_BYTES) if rest.numel() else found


def _words(piece: Tensor) -> Tensor:
    """Its words, int32: a view, unless they are not whole or do not begin where a word may."""
    missing = -piece.numel() % WORD_BYTES
    if missing or piece.storage_offset() % WORD_BYTES:
        piece = torch.cat([piece, piece.new_zeros(missing)])
    return piece.view(torch.int32)


@functools.cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """The factors t of a block's words, and the first powers of K, int64, on a device."""
    numbers = np.arange(1, _BLOCK + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        bits = numbers * np.uint64(_GOLDEN)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        bits = (bits ^ (bits >> np.uint64(31))) | np.uint64(1)
    powers = [_power(number) for number in range(max(_AT_ONCE.values()))]
    # Out of pageable memory: they are there when this returns, for every stream.
    return torch.from_numpy(bits.view(np.int64)).to(device), torch.tensor(powers).to(device)


def _power(number: int) -> int:
    """K to this power, as an int64 that wrapped."""
    found = pow(_K, number, _BITS)
    return found - _BITS if found >= _BITS // 2 else found
