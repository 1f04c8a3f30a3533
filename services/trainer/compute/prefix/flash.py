"""Attention over a flat batch with trees of pieces, or with sinks, by FlashAttention.

Every piece meets itself in one call for all of them; then the tokens below pieces that others continue meet
those pieces, in a call for all pieces that have as many above them. What the calls come to is merged by the
logarithms of the sums of their exponentials, and the backward pass of each is given what was merged: what it
finds then is its part of the gradient, as between the blocks of ring attention (Liu et al. 2023).

A sink is a score of a head that each token meets and that has no value (gpt-oss model card, OpenAI 2025). It
is merged as a call would be that came to nothing, with the sink as its sum.

Invariant: a token meets each one that it sees in one call, and no other token in any. Calls are merged in
float32, in the same order every time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from services.trainer.compute.memory.transfer import on_device
from services.trainer.compute.prefix.layout import TreeRun


class Run(NamedTuple):
    """Sequences end to end.

    Attributes:
        offsets: int32 [sequences + 1], where each begins, and the end; on the device.
        longest: tokens.
    """

    offsets: Tensor
    longest: int


@dataclass(frozen=True)
class Level:
    """Pieces that others continue, of which none is above another one, and what is below them.

    Attributes:
        below: the tokens that see them, in the flat batch, and `piece`: their own; int64, or a run of them.
        queries, keys: the same as sequences, one of each for a piece.
    """

    below: Tensor | slice
    piece: Tensor | slice
    queries: Run
    keys: Run


class FlashAttention:
    """torch's, in the form in which its `varlen_attn` calls it: of queries [T, heads, size], and of keys and
    values [S, key heads, size]."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        runs: tuple[Run, Run],
        causal: bool,
        scale: float,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """[T, heads, size], and of each head and query the logarithm of the sum of the exponentials of its
        scores, float32 [heads, T].

        Args:
            runs: the sequences of queries, and those of keys.
            window: tokens that each sees where it is causal, itself included; None: all before it.
        """
        output, sums, *_ = torch.ops.aten._flash_attention_forward(
            query,
            key,
            value,
            *_asked(runs, causal, window),
            return_debug_mask=False,
            scale=scale,
            **_seen(causal, window),
        )
        return output, sums

    def backward(
        self,
        above: Tensor,
        given: tuple[Tensor, Tensor, Tensor],
        made: tuple[Tensor, Tensor],
        runs: tuple[Run, Run],
        causal: bool,
        scale: float,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of query, key and value.

        Args:
            above: of what was made.
            given: query, key and value; `made`: as `forward` made it, or as it was merged with others.
        """
        drawn = _drawn(above.device), torch.empty(0, device=above.device)
        found = torch.ops.aten._flash_attention_backward(
            above,
            *given,
            *made,
            *_asked(runs, causal, window),
            *drawn,
            scale=scale,
            **_seen(causal, window),
        )
        return cast(tuple[Tensor, Tensor, Tensor], found)


def _asked(
    runs: tuple[Run, Run], causal: bool, window: int | None
) -> tuple[Tensor, Tensor, int, int, float, bool]:
    """What its kernels are told of sequences; nothing is dropped. Causal they call what has no window."""
    queries, keys = runs
    return queries.offsets, keys.offsets, queries.longest, keys.longest, 0.0, causal and window is None


def _seen(causal: bool, window: int | None) -> dict[str, int]:
    """How many tokens before and after its own each sees; -1: all."""
    before, after = -1 if window is None else window - 1, 0 if causal else -1
    return {"window_size_left": before, "window_size_right": after}


@cache
def _drawn(device: torch.device) -> Tensor:
    """The state of what draws whom to drop. Nobody is."""
    return torch.zeros(2, dtype=torch.uint64, device=device)


def levels_of(lengths: Sequence[int], trees: Sequence[tuple[int, TreeRun]], device: str) -> tuple[Level, ...]:
    """The pieces of a flat batch that others continue, by how many are above them; as of `Layout`."""
    starts = list(accumulate(lengths, initial=0))
    levels: list[list[tuple[int, int, int]]] = []
    for first, tree in trees:
        above: list[int] = []
        for start, stop, end in (tuple(starts[first] + place for place in seen) for seen in tree.seen):
            while above and above[-1] <= start:
                above.pop()
            levels += [[]] if len(above) == len(levels) else []
            levels[len(above)].append((start, stop, end))
            above.append(end)
    return tuple(_level(places, device) for places in levels)


def _level(places: Sequence[tuple[int, int, int]], device: str) -> Level:
    below = [(stop, end) for _, stop, end in places]
    piece = [(start, stop) for start, stop, _ in places]
    return Level(_tokens(below, device), _tokens(piece, device), _run(below, device), _run(piece, device))


def _tokens(runs: Sequence[tuple[int, int]], device: str) -> Tensor | slice:
    """Those of runs. Of one alone nothing has to be gathered."""
    if len(runs) == 1:
        return slice(*runs[0])
    return on_device(torch.cat([torch.arange(*run) for run in runs]), device)


def _run(runs: Sequence[tuple[int, int]], device: str) -> Run:
    sizes = [stop - start for start, stop in runs]
    offsets = torch.tensor([0, *accumulate(sizes)], dtype=torch.int32)
    return Run(on_device(offsets, device), max(sizes))


def attend_pieces(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    own: Run,
    levels: Sequence[Level],
    scale: float,
    kernel: FlashAttention | None = None,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of a flat batch, in which some tokens see pieces above their own.

    Args:
        query: [T, heads, size]; `key` and `value`: [T, key heads, size].
        own: all pieces.
        kernel: what computes calls; None: torch's.
        window: tokens of its own piece that each sees, itself included; None: all before it.
        sinks: [heads], a score of each head that takes part and has no value.

    Returns:
        [T, heads, size].

    Raises:
        ValueError: there is a window, and pieces above others: a call has one window for all of its queries,
            which are as far from what is above them as each is.
    """
    if window is not None and levels:
        raise ValueError("a window does not go beyond a piece")
    rules = _Rules(own, tuple(levels), scale, window, kernel or FlashAttention())
    return cast(Tensor, _Attention.apply(query, key, value, sinks, rules))


class _Rules(NamedTuple):
    """As of `attend_pieces`."""

    own: Run
    levels: tuple[Level, ...]
    scale: float
    window: int | None
    kernel: FlashAttention


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, rules: _Rules
    ) -> Tensor:
        own, levels, scale, window, kernel = rules
        output, sums = kernel.forward(query, key, value, (own, own), True, scale, window)
        # What gets one factor and no part beside needs no copy in float32.
        merged = output.float() if levels else output
        if sinks is not None:
            after = torch.logaddexp(sums, sinks.float()[:, None])
            merged.mul_(_shares(sums, after))
            sums = after
        for level in levels:
            below, piece, runs = level.below, level.piece, (level.queries, level.keys)
            made, found = kernel.forward(query[below], key[piece], value[piece], runs, False, scale)
            before = sums[:, below]
            after = torch.logaddexp(before, found)
            merged[below] = merged[below] * _shares(before, after) + made * _shares(found, after)
            sums[:, below] = after
        output = merged.to(output.dtype)
        ctx.save_for_backward(query, key, value, sinks, output, sums)
        ctx.rules = rules
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, sums = ctx.saved_tensors
        own, levels, scale, window, kernel = ctx.rules
        above = grads[0].contiguous()
        found = kernel.backward(above, (query, key, value), (output, sums), (own, own), True, scale, window)
        dquery, dkey, dvalue = (each.float() for each in found) if levels else found
        for level in levels:
            below, piece, runs = level.below, level.piece, (level.queries, level.keys)
            given = query[below], key[piece], value[piece]
            made = output[below], sums[:, below].contiguous()
            found = kernel.backward(above[below], given, made, runs, False, scale)
            dquery[below] += found[0]
            dkey[piece] += found[1]
            dvalue[piece] += found[2]
        dsinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            # Of a softmax whose last value is nothing: minus its share of what the others come to.
            inner = (above.float() * output).sum(-1).T
            dsinks = -((sinks.float()[:, None] - sums).exp() * inner).sum(-1).to(sinks.dtype)
        return dquery.to(query.dtype), dkey.to(key.dtype), dvalue.to(value.dtype), dsinks, None


def _shares(sums: Tensor, of: Tensor) -> Tensor:
    """What a call's output [T, heads, size] counts in the merged one: [T, heads, 1]."""
    return (sums - of).exp().T[..., None]
