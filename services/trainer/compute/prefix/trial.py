"""Whether a device computes once what sequences share, and whether its kernel computes attention with sinks,
found by trying before anything depends on it.

Invariant: all ranks come to the same answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from services.trainer.compute.exchange import least
from services.trainer.compute.prefix.attention import Rules, attend_tree
from services.trainer.compute.prefix.calls import MOST_KEYS, levels_of, of_themselves, within_window
from services.trainer.compute.prefix.flash import FlashAttention, attend_pieces
from services.trainer.compute.prefix.layout import TreeRun
from services.trainer.compute.split.asked import Asked

log = logging.getLogger(__name__)

_NESTED = TreeRun((200, 70, 33, 1, 17), (-1, 0, 1, 1, 0))
"""Three pieces above one another, of more tokens than a kernel's block."""
_ONE = TreeRun((700, 1), (-1, 0))
_OTHER = TreeRun((9, 1), (-1, 0))
"""Pieces that one token continues, for which kernels have a way of their own where there are no others; and
the keys of the first are so many that they are divided and put together again."""
_ERROR = 2e-2
"""Of a norm: what bfloat16 may be away from float32."""
_SINKS = 5.0
"""About what sinks are here: of random scores, the logarithm of a sum of a hundred. So they take a part that
nothing can be right without."""


def _alone(*lengths: int) -> tuple[TreeRun, ...]:
    """Sequences that share nothing."""
    return tuple(TreeRun((length,), (-1,)) for length in lengths)


@dataclass(frozen=True)
class _Case:
    """What is attended to."""

    trees: tuple[TreeRun, ...]
    window: int | None = None
    sinks: bool = False
    most_keys: int = MOST_KEYS


_TREES = _Case((_NESTED, _ONE, *_alone(30))), _Case((_ONE, _OTHER, *_alone(30)))
# A window that is no multiple of a kernel's block, and shorter than pieces and than what is above others; and
# one that almost all is seen through, by a token that has a call of its own.
_THROUGH_WINDOWS = (
    _Case((_NESTED, _ONE, *_alone(30)), 100),
    _Case((_ONE, _OTHER, *_alone(30)), 700, most_keys=600),
)
# A window that is no multiple of a kernel's block; and single tokens, for which kernels may have another way.
_WITH_SINKS = (
    _Case(_alone(200, 700, 1, 30), sinks=True),
    _Case(_alone(200, 700, 1, 30), 100, sinks=True),
    _Case(_alone(1, 1, 1), sinks=True),
)


def attends_to_trees(asked: Sequence[Asked], context_length: int, device: str) -> bool:
    """Whether every layer of a model attends to trees, on every rank. All ranks call it.

    Args:
        asked: of each layer; none of an architecture that computes one sequence at a time.
        context_length: most tokens of a sequence; a window that is no shorter is none.
    """
    if not asked:
        log.info("prefixes are not shared, as this architecture computes one sequence at a time")
        return False
    if device == "cpu":
        return True
    return bool(least([int(_attends_here(asked, context_length, device))], device)[0])


def _attends_here(asked: Sequence[Asked], context_length: int, device: str) -> bool:
    """Whether they do on this rank."""
    if any(layer.recurrent and layer.kernel for layer in asked):
        log.info("prefixes are not shared, as a kernel of linear attention computes here that knows none")
        return False
    asked = [layer for layer in asked if not layer.recurrent]
    if not all(layer.kernel for layer in asked):
        log.info("prefixes are not shared, as no kernel of this device does all that a layer asks for")
        return False
    kinds = {(layer.shape, layer.sinks, layer.within(context_length).window is not None) for layer in asked}
    return all(
        works(device, FlashAttention(), *shape, sinks=sinks, windows=windows)
        for shape, sinks, windows in sorted(kinds)
    )


def works(
    device: str,
    kernel: FlashAttention,
    heads: int = 4,
    key_heads: int = 2,
    size: int = 64,
    *,
    sinks: bool = False,
    windows: bool = False,
) -> bool:
    """Whether a kernel comes to plain attention, forward and backward, where calls of it are merged.

    Args:
        heads, key_heads, size: of what is attended to.
        sinks: there are some.
        windows: through some, too. Those that no sequence of a batch is longer than are none.
    """
    cases = [replace(case, sinks=sinks) for case in (*_TREES, *(_THROUGH_WINDOWS if windows else ()))]
    why = _wrong(device, kernel, (heads, key_heads, size), cases)
    if why:
        log.warning("prefixes are not shared, as attention over trees %s", why)
    return not why


def works_with_sinks(
    device: str, kernel: FlashAttention, heads: int = 4, key_heads: int = 2, size: int = 64
) -> bool:
    """The same of sequences that share nothing, where it is given sinks, with a window and without."""
    why = _wrong(device, kernel, (heads, key_heads, size), _WITH_SINKS)
    if why:
        log.warning("scores are whole matrices, as attention with sinks %s", why)
    return not why


def _wrong(
    device: str, kernel: FlashAttention, shape: tuple[int, int, int], cases: Sequence[_Case]
) -> str | None:
    """What a kernel does that it should not; None: nothing."""
    for case in cases:
        try:
            errors = _errors(device, kernel, shape, case)
        except Exception as error:
            return f"fails here: {error}"
        # What is not a number is not less than anything.
        if not all(error < _ERROR for error in errors):
            return f"is wrong here by {errors}"
    return None


def _errors(device: str, kernel: FlashAttention, shape: tuple[int, int, int], case: _Case) -> list[float]:
    """Those of what comes out and of the gradients, of their norms; and of what comes out of the tokens that
    continue a piece, which may be few among all."""
    heads, key_heads, size = shape
    lengths = tuple(length for run in case.trees for length in run.lengths)
    generator = torch.Generator().manual_seed(0)
    query, key, value, above = (
        torch.randn(sum(lengths), count, size, generator=generator).bfloat16()
        for count in (heads, key_heads, key_heads, heads)
    )
    given = [query, key, value]
    if case.sinks:
        given.append((_SINKS + torch.randn(heads, generator=generator)).bfloat16())
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    firsts = accumulate((len(run.lengths) for run in case.trees), initial=0)
    trees = list(zip(firsts, case.trees, strict=False))
    if case.window is None:
        calls = *of_themselves(lengths, ends, device), *levels_of(lengths, trees, device)
    else:
        calls = within_window(case.window, lengths, trees, device, case.most_keys)

    def merged(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        return attend_pieces(query, key, value, calls, size**-0.5, kernel, window=case.window, sinks=sinks)

    on_device = _with_gradients(merged, [each.to(device) for each in given], above.to(device))
    found = [each.float().cpu() for each in on_device]
    expected = _with_gradients(partial(_plain, case), [each.float() for each in given], above.float())
    pairs = list(zip(found, expected, strict=True))
    below = torch.cat(
        [
            torch.full((length,), above >= 0)
            for run in case.trees
            for length, above in zip(run.lengths, run.above, strict=True)
        ]
    )
    if below.any():
        pairs.append((found[0][below], expected[0][below]))
    return [float((one - other).norm() / other.norm()) for one, other in pairs]


@torch.enable_grad()
def _with_gradients(attend: Callable[..., Tensor], given: Sequence[Tensor], above: Tensor) -> list[Tensor]:
    leaves = [each.clone().requires_grad_() for each in given]
    made = attend(*leaves)
    return [made.detach(), *torch.autograd.grad(made, leaves, above)]


def _plain(case: _Case, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
    """The same on a CPU, in float32."""
    rules = Rules(query.shape[-1] ** -0.5, case.window)
    sizes = [run.tokens for run in case.trees]
    parts = [each.transpose(0, 1).split(sizes, dim=1) for each in (query, key, value)]
    made = [
        attend_tree(q, k, v, _positions(run), run, rules, sinks)
        for run, q, k, v in zip(case.trees, *parts, strict=True)
    ]
    return torch.cat(made, dim=1).transpose(0, 1)


def _positions(run: TreeRun) -> Tensor:
    """Each token's place in its sequence: int64 [tokens]."""
    ends: list[int] = []
    places = []
    for length, parent in zip(run.lengths, run.above, strict=True):
        start = 0 if parent < 0 else ends[parent]
        ends.append(start + length)
        places.append(torch.arange(start, start + length))
    return torch.cat(places)
