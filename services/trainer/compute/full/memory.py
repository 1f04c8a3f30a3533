"""What memory ranks take before they do something together with a model that trains all weights.

DeepSpeed takes it between collectives, where a rank that had none would leave the others waiting and weights
half changed. So each rank takes pieces as large beforehand, and gives them to its allocator, which has them
for what comes. While it makes a model DeepSpeed empties the allocator: of that it is known only that the
memory was there.

Invariants: all ranks begin or none does, and nothing of a model has changed then. The pieces are what
DeepSpeed takes at most beside what is there; of steps tests/component/engine/full measures it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from services.common.process import failpoints
from services.trainer.compute.full.config import BUCKET, FullModelConfig
from services.trainer.compute.memory.buffers import FlatBuffers
from services.trainer.compute.memory.room import taken_everywhere
from services.trainer.compute.optimizer import STEP_BLOCK

_SMALL = 8 << 20
"""Bytes of all that is small: norms, padding, weights that every rank holds under ZeRO-3."""
_FLOAT = 4
_LIVE = 1_000_000_000
"""Elements of weights that DeepSpeed has gathered at once (stage3_max_live_parameters)."""


class Sizes(NamedTuple):
    """Elements of a model as a rank has it.

    Attributes:
        parts: of each flat tensor of its master weights.
        touched: of the weights, whole, of which it has a part; under ZeRO-3 0.
        whole: of all weights.
        largest: of the largest weight.
    """

    parts: tuple[int, ...]
    touched: int
    whole: int
    largest: int


def step_pieces(config: FullModelConfig, sizes: Sizes) -> list[int]:
    """Bytes that a step takes of the device at most, by its large tensors. Pure.

    Gradients that are kept in float32 beside bfloat16 weights are flat already; others are made flat, one
    tensor of masters after the other. Stage 1 reduces them first, into a copy of what a rank has a part of.
    An offloaded optimizer has them on the host, and under stage 1 and 2 they come back to the device whole.
    The norm of each weight's gradient is taken of a float64 copy: mostly before any is made flat, and under
    stage 3 of what was brought from the host. What the optimizer measures its steps by is a block. A
    thread of gloo's may let go of what it has reduced a moment after all else goes on.
    """
    flat = max(sizes.parts)
    block = min(flat, STEP_BLOCK)
    norm = 2 * min(sizes.largest, flat)
    if config.stage == 3:
        pieces = [norm + norm // 2 if config.offload else max(flat, norm)]
    elif config.dtype == torch.bfloat16:
        pieces = [norm]
    elif config.stage == 1 or config.offload:
        pieces = [sizes.touched, max(flat, norm, _reduced(sizes))]
        if config.device == "cpu":
            pieces.append(_reduced(sizes))
    else:
        pieces = [flat, norm]
    return [*(_FLOAT * elements for elements in (*pieces, block)), _SMALL]


def load_pieces(config: FullModelConfig, sizes: Sizes, has_gradient: bool) -> list[int]:
    """The same of a load. Pure.

    A gradient that is there goes by a pass of one token, which adds to it, and for which ZeRO-3 gathers up to
    `_LIVE` weights. On a CPU gloo gathers what computes by a copy of it, and what is read of the files, which
    is not counted, lies in the same memory.
    """
    item = config.dtype.itemsize
    pieces = [_FLOAT * sizes.largest]
    if config.device == "cpu" and config.stage < 3:
        pieces.append(item * sizes.whole)
    if has_gradient:
        again = 0 if config.dtype == torch.bfloat16 else sizes.touched
        pieces += [_FLOAT * elements for elements in (again, _reduced(sizes), _reduced(sizes))]
    if has_gradient and config.stage == 3:
        pieces.append(item * min(sizes.whole, _LIVE))
    return [*pieces, _SMALL]


def model_pieces(config: FullModelConfig, elements: int, ranks: int) -> list[int]:
    """What a model that is made takes of each rank for good. Pure.

    That is weights, masters and moments; under ZeRO-3 the gradient too, with a bucket.

    Args:
        elements: of all its weights.
    """
    item, part = config.dtype.itemsize, -(-elements // ranks)
    if config.stage < 3:
        weights, floats = [item * elements], 3
    else:
        weights, floats = [item * part, item * BUCKET], 4
    return [*weights, *([] if config.offload else [_FLOAT * part] * floats), _SMALL]


def taken_before(pieces: Sequence[int], device: str, buffers: FlatBuffers) -> bool:
    """Whether all ranks have the memory. A collective.

    Args:
        pieces: bytes of each.
        buffers: are emptied where a rank has none.

    Raises:
        Exception: of something else than memory.
    """
    taken: list[Tensor] = []

    def take() -> None:
        failpoints.hit("trainer.before_step_memory")
        taken.extend(torch.empty(size, dtype=torch.uint8, device=device) for size in pieces)

    def give_back() -> None:
        taken.clear()
        buffers.clear()

    return taken_everywhere(take, give_back, device)


def _reduced(sizes: Sizes) -> int:
    """Elements that are reduced at once: weights that are larger than a bucket are by themselves."""
    return min(sizes.whole, max(BUCKET, sizes.largest))
