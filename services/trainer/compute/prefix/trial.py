"""Whether a device computes once what sequences share, found by trying before anything depends on it.

Invariant: all ranks come to the same answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from services.trainer.compute.exchange import least
from services.trainer.compute.prefix.attention import Rules, attend_tree
from services.trainer.compute.prefix.flash import FlashAttention, Kernel, Run, attend_pieces, seen_of
from services.trainer.compute.prefix.layout import TreeRun
from services.trainer.compute.split.asked import Asked

log = logging.getLogger(__name__)

_HEADS, _KEY_HEADS, _SIZE = 4, 2, 64
_TREE = TreeRun((40, 24, 17), ((0, 40, 81),))
"""Two pieces that continue one of 40 tokens."""
_BESIDE = 30
"""Tokens of a sequence after it."""
_ERROR = 2e-2
"""Of a norm: what bfloat16 may be away from float32."""


def attends_to_trees(asked: Sequence[Asked], device: str) -> bool:
    """Whether every layer of a model attends to trees, on every rank. All ranks call it.

    Args:
        asked: of each layer; none of an architecture that computes one sequence at a time.
    """
    if not asked or device == "cpu":
        return bool(asked)
    if not all(layer.kernel and layer.window is None for layer in asked):
        return False
    return bool(least([int(works(device, FlashAttention()))], device)[0])


def works(device: str, kernel: Kernel) -> bool:
    """Whether a kernel comes to plain attention, forward and backward, where calls of it are merged."""
    lengths = *_TREE.lengths, _BESIDE
    generator = torch.Generator().manual_seed(0)
    query, key, value, above = (
        torch.randn(sum(lengths), count, _SIZE, generator=generator).bfloat16()
        for count in (_HEADS, _KEY_HEADS, _KEY_HEADS, _HEADS)
    )
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)

    def merged(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        seen = seen_of(lengths, [(0, _TREE)], device)
        return attend_pieces(query, key, value, Run(ends, max(lengths)), seen, _SIZE**-0.5, kernel)

    try:
        on_device = [each.to(device) for each in (query, key, value, above)]
        found = [each.float().cpu() for each in _with_gradients(merged, *on_device)]
    except RuntimeError as error:
        log.warning("prefixes are not shared, as attention over trees fails here: %s", error)
        return False
    expected = _with_gradients(_plain, *(each.float() for each in (query, key, value, above)))
    errors = [float((one - other).norm() / other.norm()) for one, other in zip(found, expected, strict=True)]
    if max(errors) < _ERROR:
        return True
    log.warning("prefixes are not shared, as attention over trees is wrong here by %s", errors)
    return False


@torch.enable_grad()
def _with_gradients(
    attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, above: Tensor
) -> list[Tensor]:
    given = [each.clone().requires_grad_() for each in (query, key, value)]
    made = attend(*given)
    return [made.detach(), *torch.autograd.grad(made, given, above)]


def _plain(*given: Tensor) -> Tensor:
    """The same on a CPU, in float32."""
    first, *rest = _TREE.lengths
    in_tree = [torch.arange(first), *(first + torch.arange(length) for length in rest)]
    runs = [(_TREE, torch.cat(in_tree)), (TreeRun((_BESIDE,), ()), torch.arange(_BESIDE))]
    halves = [each.transpose(0, 1).split([_TREE.tokens, _BESIDE], dim=1) for each in given]
    made = [
        attend_tree(query, key, value, positions, run, Rules(_SIZE**-0.5))
        for (run, positions), query, key, value in zip(runs, *halves, strict=True)
    ]
    return torch.cat(made, dim=1).transpose(0, 1)
