"""Tensors whose memory is on the host while nobody computes with them.

Invariant: what comes back has the bits that left, in the tensors that they were in: the memory below these
goes and comes, so views of them stay good. Nobody waits for a copy, where the host's memory is page-locked
(staging.py): on CUDA what is done with the device's memory, and with the host's, comes after it on the same
stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from services.trainer.compute.memory import staging

_LEAST_PIECE = 2**20
"""Bytes. Page-locked memory comes in powers of two, so that a piece of any other size would take more."""


def pieces(nbytes: int) -> list[int]:
    """Sizes of the pieces of page-locked memory that so many bytes are in: powers of two, so that no more is
    taken than there are, but for less than a mebibyte. Pure."""
    found = []
    while nbytes > _LEAST_PIECE:
        found.append(1 << (nbytes.bit_length() - 1))
        nbytes -= found[-1]
    return [*found, nbytes] if nbytes else found


class Away:
    """Room on the host for tensors of one device, which are either there or where they were.

    Args:
        tensors: each with memory of its own, all of it.

    Raises:
        RuntimeError: the host has no memory for them.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [tensor.detach() for tensor in tensors]
        self._bytes = [tensor.untyped_storage().nbytes() for tensor in self._tensors]
        assert self._bytes == [tensor.nbytes for tensor in self._tensors], "a tensor shares its memory"
        self._copies = [_room(tensor) for tensor in self._tensors]

    def leave(self) -> None:
        """The values go to the host, and the device's memory is free."""
        for tensor, copy in zip(self._tensors, self._copies, strict=True):
            for part, piece in _parts(tensor, copy):
                staging.copy(piece, part)
            tensor.untyped_storage().resize_(0)

    def take_room(self) -> None:
        """Takes the device's memory again; there is nothing in it yet.

        Raises:
            RuntimeError: it has none.
        """
        for tensor, nbytes in zip(self._tensors, self._bytes, strict=True):
            tensor.untyped_storage().resize_(nbytes)

    def give_room(self) -> None:
        """Gives back what `take_room` took, all of it or the part that it came to."""
        for tensor in self._tensors:
            tensor.untyped_storage().resize_(0)

    def come_back(self) -> None:
        """The values come into the device's memory, which was taken, and the host's is free."""
        for tensor, copy in zip(self._tensors, self._copies, strict=True):
            for part, piece in _parts(tensor, copy):
                staging.copy(part, piece)
        self._copies = []


def _room(tensor: Tensor) -> list[Tensor]:
    if tensor.device.type == "cpu":
        return [torch.empty(tensor.nbytes, dtype=torch.uint8)]
    return [staging.room([size], torch.uint8) for size in pieces(tensor.nbytes)]


def _parts(tensor: Tensor, copy: Sequence[Tensor]) -> zip[tuple[Tensor, Tensor]]:
    """The bytes of a tensor, piece by piece, beside the host's."""
    parts = tensor.view(-1).view(torch.uint8).split([piece.numel() for piece in copy])
    return zip(parts, copy, strict=True)
