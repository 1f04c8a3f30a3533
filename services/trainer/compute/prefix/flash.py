"""Attention over a flat batch with trees of pieces, by FlashAttention.

Every piece meets itself in one call for all of them; then the tokens below a piece that others continue meet
that piece, in a call for each. What the calls come to is merged by the logarithms of the sums of their
exponentials, and the backward pass of each is given what was merged: what it finds then is its part of the
gradient, as between the blocks of ring attention (Liu et al. 2023).

Invariant: a token meets each one that it sees in one call, and no other token in any. Calls are merged in
float32, in the same order every time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, cast

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
class Seen:
    """A piece that others continue: the tokens from `stop` to `end` see those from `start` to `stop`.

    Attributes:
        below, piece: these tokens, each as one sequence.
    """

    start: int
    stop: int
    end: int
    below: Run
    piece: Run


class Kernel(Protocol):
    """What computes attention of queries [T, heads, size] and keys and values [S, key heads, size]."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, runs: tuple[Run, Run], causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """[T, heads, size], and of each head and query the logarithm of the sum of the exponentials of its
        scores, float32 [heads, T].

        Args:
            runs: the sequences of queries, and those of keys.
        """

    def backward(
        self,
        above: Tensor,
        given: tuple[Tensor, Tensor, Tensor],
        made: tuple[Tensor, Tensor],
        runs: tuple[Run, Run],
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of query, key and value.

        Args:
            above: of what was made.
            given: query, key and value; `made`: as `forward` made it, or as it was merged with others.
        """


class FlashAttention:
    """torch's, in the form in which its `varlen_attn` calls it."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, runs: tuple[Run, Run], causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        queries, keys = runs
        output, sums, *_ = torch.ops.aten._flash_attention_forward(
            query,
            key,
            value,
            queries.offsets,
            keys.offsets,
            queries.longest,
            keys.longest,
            0.0,
            causal,
            return_debug_mask=False,
            scale=scale,
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
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel`."""
        queries, keys = runs
        # Nothing is dropped, so nothing is drawn.
        drawn = torch.zeros(2, dtype=torch.uint64, device=above.device)
        found = torch.ops.aten._flash_attention_backward(
            above,
            *given,
            *made,
            queries.offsets,
            keys.offsets,
            queries.longest,
            keys.longest,
            0.0,
            causal,
            drawn,
            torch.empty(0, device=above.device),
            scale=scale,
        )
        return cast(tuple[Tensor, Tensor, Tensor], found)


def seen_of(lengths: Sequence[int], trees: Sequence[tuple[int, TreeRun]], device: str) -> tuple[Seen, ...]:
    """The pieces that others continue, of a flat batch; as of `Layout`."""
    starts = list(accumulate(lengths, initial=0))
    places = [
        (starts[first] + start, starts[first] + stop, starts[first] + end)
        for first, tree in trees
        for start, stop, end in tree.seen
    ]
    sizes = [[[0, end - stop], [0, stop - start]] for start, stop, end in places]
    offsets = on_device(torch.tensor(sizes, dtype=torch.int32), device)
    return tuple(
        Seen(start, stop, end, Run(below, end - stop), Run(piece, stop - start))
        for (start, stop, end), (below, piece) in zip(places, offsets, strict=True)
    )


def attend_pieces(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    own: Run,
    seen: Sequence[Seen],
    scale: float,
    kernel: Kernel | None = None,
) -> Tensor:
    """Attention of a flat batch, in which some tokens see pieces above their own.

    Args:
        query: [T, heads, size]; `key` and `value`: [T, key heads, size].
        own: all pieces.
        kernel: FlashAttention by default.

    Returns:
        [T, heads, size].
    """
    given = query, key, value
    return cast(Tensor, _Attention.apply(*given, own, tuple(seen), scale, kernel or FlashAttention()))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        own: Run,
        seen: tuple[Seen, ...],
        scale: float,
        kernel: Kernel,
    ) -> Tensor:
        output, sums = kernel.forward(query, key, value, (own, own), True, scale)
        merged = output.float()
        for each in seen:
            below, piece = slice(each.stop, each.end), slice(each.start, each.stop)
            runs = each.below, each.piece
            made, found = kernel.forward(query[below], key[piece], value[piece], runs, False, scale)
            before = sums[:, below].clone()
            sums[:, below] = torch.logaddexp(before, found)
            merged[below] *= _shares(before, sums[:, below])
            merged[below] += made * _shares(found, sums[:, below])
        output = merged.to(output.dtype)
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.own, ctx.seen, ctx.scale, ctx.kernel = own, seen, scale, kernel
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, sums = ctx.saved_tensors
        above, own, scale, kernel = grads[0].contiguous(), ctx.own, ctx.scale, ctx.kernel
        found = kernel.backward(above, (query, key, value), (output, sums), (own, own), True, scale)
        dquery, dkey, dvalue = (each.float() for each in found)
        for each in ctx.seen:
            below, piece = slice(each.stop, each.end), slice(each.start, each.stop)
            given, made = (
                (query[below], key[piece], value[piece]),
                (output[below], sums[:, below].contiguous()),
            )
            found = kernel.backward(above[below], given, made, (each.below, each.piece), False, scale)
            for total, part in zip((dquery[below], dkey[piece], dvalue[piece]), found, strict=True):
                total += part
        gradients = dquery.to(query.dtype), dkey.to(key.dtype), dvalue.to(value.dtype)
        return (*gradients, None, None, None, None)


def _shares(sums: Tensor, of: Tensor) -> Tensor:
    """What a call's output [T, heads, size] counts in the merged one: [T, heads, 1]."""
    return (sums - of).exp().T[..., None]
