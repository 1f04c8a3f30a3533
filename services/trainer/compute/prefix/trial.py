"""Whether a device computes once what sequences share, found by trying before anything depends on it.

Invariant: all ranks come to the same answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from services.trainer.compute.exchange import least
from services.trainer.compute.prefix.attention import Rules, attend_tree
from services.trainer.compute.prefix.flash import FlashAttention, Run, attend_pieces, levels_of
from services.trainer.compute.prefix.layout import TreeRun
from services.trainer.compute.split.asked import Asked

log = logging.getLogger(__name__)

Tree = tuple[TreeRun, tuple[int, ...]]
"""A tree, and of each of its pieces the one that it continues; -1: none."""

_NESTED = TreeRun((200, 70, 33, 1, 17), ((0, 200, 321), (200, 270, 304))), (-1, 0, 1, 1, 0)
"""Three pieces above one another, of more tokens than a kernel's block; and of each the one it continues."""
_ONE = TreeRun((700, 1), ((0, 700, 701),)), (-1, 0)
_OTHER = TreeRun((9, 1), ((0, 9, 10),)), (-1, 0)
"""Pieces that one token continues, for which kernels have a way of their own where there are no others; and
the keys of the first are so many that they are divided and put together again."""
_BESIDE = 30
"""Tokens of a sequence after them."""
_ERROR = 2e-2
"""Of a norm: what bfloat16 may be away from float32."""


def attends_to_trees(asked: Sequence[Asked], context_length: int, device: str) -> bool:
    """Whether every layer of a model attends to trees, on every rank. All ranks call it.

    Args:
        asked: of each layer; none of an architecture that computes one sequence at a time.
        context_length: most tokens of a sequence, which a window may not be shorter than.
    """
    if not asked:
        log.info("prefixes are not shared, as this architecture computes one sequence at a time")
        return False
    if device == "cpu":
        return True
    if not all(layer.kernel and layer.within(context_length).window is None for layer in asked):
        log.info("prefixes are not shared, as no kernel of this device does all that a layer asks for")
        return False
    shapes = {(layer.heads, layer.key_heads, layer.size) for layer in asked}
    mine = all(works(device, FlashAttention(), *shape) for shape in sorted(shapes))
    return bool(least([int(mine)], device)[0])


def works(device: str, kernel: FlashAttention, heads: int = 4, key_heads: int = 2, size: int = 64) -> bool:
    """Whether a kernel comes to plain attention, forward and backward, where calls of it are merged.

    Args:
        heads, key_heads, size: of what is attended to.
    """
    for trees in ((_NESTED, _ONE), (_ONE, _OTHER)):
        try:
            errors = _errors(device, kernel, (heads, key_heads, size), trees)
        except Exception as error:
            log.warning("prefixes are not shared, as attention over trees fails here: %s", error)
            return False
        # What is not a number is not less than anything.
        if not all(error < _ERROR for error in errors):
            log.warning("prefixes are not shared, as attention over trees is wrong here by %s", errors)
            return False
    return True


def _errors(
    device: str, kernel: FlashAttention, shape: tuple[int, int, int], trees: Sequence[Tree]
) -> list[float]:
    """Those of what comes out and of the three gradients, of their norms; and of what comes out of the tokens
    that continue a piece, which may be few among all."""
    heads, key_heads, size = shape
    lengths = *(length for run, _ in trees for length in run.lengths), _BESIDE
    generator = torch.Generator().manual_seed(0)
    query, key, value, above = (
        torch.randn(sum(lengths), count, size, generator=generator).bfloat16()
        for count in (heads, key_heads, key_heads, heads)
    )
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    firsts = accumulate((len(run.lengths) for run, _ in trees), initial=0)
    levels = levels_of(
        lengths, [(first, run) for first, (run, _) in zip(firsts, trees, strict=False)], device
    )

    def merged(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend_pieces(query, key, value, Run(ends, max(lengths)), levels, size**-0.5, kernel)

    on_device = [each.to(device) for each in (query, key, value, above)]
    found = [each.float().cpu() for each in _with_gradients(merged, *on_device)]
    expected = _with_gradients(partial(_plain, trees), *(each.float() for each in (query, key, value, above)))
    pairs = list(zip(found, expected, strict=True))
    below = torch.cat([torch.full((length,), above >= 0) for length, above in _parents(trees)])
    pairs.append((found[0][: len(below)][below], expected[0][: len(below)][below]))
    return [float((one - other).norm() / other.norm()) for one, other in pairs]


@torch.enable_grad()
def _with_gradients(
    attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, above: Tensor
) -> list[Tensor]:
    given = [each.clone().requires_grad_() for each in (query, key, value)]
    made = attend(*given)
    return [made.detach(), *torch.autograd.grad(made, given, above)]


def _plain(trees: Sequence[Tree], *given: Tensor) -> Tensor:
    """The same on a CPU, in float32."""
    runs = [*trees, (TreeRun((_BESIDE,), ()), (-1,))]
    rules = Rules(given[0].shape[-1] ** -0.5)
    parts = [each.transpose(0, 1).split([run.tokens for run, _ in runs], dim=1) for each in given]
    made = [
        attend_tree(query, key, value, _positions(run, above), run, rules)
        for (run, above), query, key, value in zip(runs, *parts, strict=True)
    ]
    return torch.cat(made, dim=1).transpose(0, 1)


def _parents(trees: Sequence[Tree]) -> Iterator[tuple[int, int]]:
    """Of each piece of trees its tokens, and the piece that it continues."""
    for run, above in trees:
        yield from zip(run.lengths, above, strict=True)


def _positions(run: TreeRun, above: Sequence[int]) -> Tensor:
    """Each token's place in its sequence: int64 [tokens]."""
    ends: list[int] = []
    places = []
    for length, parent in zip(run.lengths, above, strict=True):
        start = 0 if parent < 0 else ends[parent]
        ends.append(start + length)
        places.append(torch.arange(start, start + length))
    return torch.cat(places)
