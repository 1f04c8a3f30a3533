"""Attention over a tree of pieces: each token sees its own piece and those above it, up to itself.

A piece's keys are met by each run of queries that sees them, its own and then those below it, and what the
runs come to is merged by the logarithms of the sums of their exponentials. The backward pass goes through the
same runs with the merged sums. So nothing is copied per sequence: memory is that of the tokens in the tree,
and the work that of attention alone.

Invariant: exact, in float32 whatever the inputs are, and in the same order every time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor

from services.trainer.compute.prefix.layout import TreeRun

SCORE_ELEMENTS = 1 << 24
"""Scores that exist at a time: 64 MiB of float32."""


@dataclass(frozen=True)
class Rules:
    """What an architecture's attention is.

    Attributes:
        scale: of the scores.
        window: tokens that each sees, itself included; None: all before it.
        softcap: scores are softcap * tanh(score / softcap); None: as they are.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True)
class _Block:
    """Queries and the keys that they meet, counted from the tree's first token.

    Attributes:
        count: so many blocks of equal sizes lie one after the other, and are computed at once.
    """

    query: int
    queries: int
    key: int
    keys: int
    count: int = 1


def attend_tree(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    tree: TreeRun,
    rules: Rules,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of a tree's tokens.

    Args:
        query: [heads, T, head size]; `key` and `value` may have fewer heads, `value` another size.
        positions: int64 [T].
        sinks: [heads], a score of each head that takes part and has no value.

    Returns:
        [heads, T, head size of `value`], in the dtype of `value`.
    """
    return cast(Tensor, _TreeAttention.apply(query, key, value, sinks, positions, tree, rules))


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        positions: Tensor,
        tree: TreeRun,
        rules: Rules,
    ) -> Tensor:
        q, k, v = query.float().unflatten(0, (key.shape[0], -1)), key.float(), value.float()
        sums = q.new_full(q.shape[:3], -torch.inf)
        if sinks is not None:
            sums = sinks.float().view(*q.shape[:2], 1).expand(q.shape[:3]).clone()
        output = q.new_zeros(*q.shape[:3], v.shape[-1])
        for block in _blocks(tree, query.shape[0]):
            scores, _ = _scores(q, k, positions, block, rules)
            before = _folded(sums, block)
            after = torch.logaddexp(before, scores.logsumexp(-1))
            made = _folded(output, block) * (before - after).exp()[..., None]
            made += (scores - after[..., None]).exp() @ _stacked(v, block)
            _unfold(output, block, made)
            _unfold(sums, block, after)
        ctx.save_for_backward(query, key, value, sinks, positions, output, sums)
        ctx.tree, ctx.rules = tree, rules
        return output.flatten(0, 1).to(value.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, positions, output, sums = ctx.saved_tensors
        q, k, v = query.float().unflatten(0, (key.shape[0], -1)), key.float(), value.float()
        above = grads[0].float().unflatten(0, q.shape[:2])
        inner = (above * output).sum(-1)
        dq, dk, dv = (torch.zeros_like(tensor) for tensor in (q, k, v))
        for block in _blocks(ctx.tree, query.shape[0]):
            scores, slope = _scores(q, k, positions, block, ctx.rules)
            part = _folded(above, block)
            shares = (scores - _folded(sums, block)[..., None]).exp_()
            _stacked(dv, block).add_(shares.transpose(-1, -2) @ part)
            changes = part @ _stacked(v, block).transpose(-1, -2)
            changes = changes.sub_(_folded(inner, block)[..., None]).mul_(shares).mul_(ctx.rules.scale)
            if slope is not None:
                changes.mul_(slope)
            _stacked(dk, block).add_(changes.transpose(-1, -2) @ _folded(q, block))
            _unfold(dq, block, _folded(dq, block) + changes @ _stacked(k, block))
        dsinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            shares = (sinks.float().view(*q.shape[:2], 1) - sums).exp()
            dsinks = -(shares * inner).sum(-1).view(-1).to(sinks.dtype)
        return (
            dq.flatten(0, 1).to(query.dtype),
            dk.to(key.dtype),
            dv.to(value.dtype),
            dsinks,
            *(None,) * 3,
        )


def _blocks(tree: TreeRun, heads: int) -> Iterator[_Block]:
    """Each token with its own piece first, so that it has seen something when it meets what is above it."""
    start = 0
    for length, run in groupby(tree.lengths):
        count = sum(1 for _ in run)
        most = SCORE_ELEMENTS // (heads * length * length)
        if most:
            for first in range(0, count, most):
                place = start + first * length
                yield _Block(place, length, place, length, min(most, count - first))
        else:
            rows = max(1, SCORE_ELEMENTS // (heads * length))
            for place in range(start, start + count * length, length):
                for low in range(0, length, rows):
                    high = min(low + rows, length)
                    yield _Block(place + low, high - low, place, high)
        start += count * length
    for begin, stop, end in tree.seen:
        rows = max(1, SCORE_ELEMENTS // (heads * (stop - begin)))
        for low in range(stop, end, rows):
            yield _Block(low, min(rows, end - low), begin, stop - begin)


def _scores(
    q: Tensor, k: Tensor, positions: Tensor, block: _Block, rules: Rules
) -> tuple[Tensor, Tensor | None]:
    """[key heads, count, group * queries, keys], minus infinity where a key is not seen; and the derivative
    of the soft cap."""
    scores = (_folded(q, block) @ _stacked(k, block).transpose(-1, -2)).mul_(rules.scale)
    slope = None
    if rules.softcap is not None:
        capped = scores.div_(rules.softcap).tanh_()
        slope = 1 - capped.square()
        scores = capped * rules.softcap
    own = block.key + block.keys > block.query
    if own or rules.window is not None:
        behind = (
            positions[block.query : block.query + block.queries, None]
            - positions[block.key : block.key + block.keys]
        )
        hidden = behind < 0
        if rules.window is not None:
            hidden |= behind >= rules.window
        scores.unflatten(2, (-1, block.queries)).masked_fill_(hidden, -torch.inf)
    return scores, slope


def _stacked(tensor: Tensor, block: _Block) -> Tensor:
    """The block's keys or values, [key heads, count, keys, ...]: a view."""
    return tensor[:, block.key : block.key + block.count * block.keys].unflatten(1, (block.count, -1))


def _folded(tensor: Tensor, block: _Block) -> Tensor:
    """What the block's queries have of [key heads, group, T, ...]:
    [key heads, count, group * queries, ...]."""
    mine = tensor[:, :, block.query : block.query + block.count * block.queries]
    return mine.unflatten(2, (block.count, -1)).transpose(1, 2).flatten(2, 3)


def _unfold(tensor: Tensor, block: _Block, made: Tensor) -> None:
    """Writes what `_folded` would read."""
    mine = tensor[:, :, block.query : block.query + block.count * block.queries]
    mine.unflatten(2, (block.count, -1)).copy_(made.unflatten(2, (tensor.shape[1], -1)).transpose(1, 2))
