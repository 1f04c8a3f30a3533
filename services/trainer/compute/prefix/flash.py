"""Attention over a flat batch with trees of pieces, or with sinks, by FlashAttention.

What its calls come to (calls.py) is merged by the logarithms of the sums of their exponentials, and the
backward pass of each is given what was merged: what it finds then is its part of the gradient, as between the
blocks of ring attention (Liu et al. 2023).

A sink is a score of a head that each token meets and that has no value (gpt-oss model card, OpenAI 2025). It
is merged as a call would be that came to nothing, with the sink as its sum.

Invariant: calls are merged in float32, in the same order every time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from services.trainer.compute.prefix.calls import Call, Run


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


def attend_pieces(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    calls: Sequence[Call],
    scale: float,
    kernel: FlashAttention | None = None,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of a flat batch, in which some tokens see pieces above their own.

    Args:
        query: [T, heads, size]; `key` and `value`: [T, key heads, size].
        calls: that make it up, those in which tokens meet others up to themselves first:
            `calls.of_themselves` and `calls.levels_of`, or with a window `calls.within_window`.
        kernel: what computes calls; None: torch's.
        window: tokens that each sees, itself included; None: all before it.
        sinks: [heads], a score of each head that takes part and has no value.

    Returns:
        [T, heads, size].

    Raises:
        ValueError: there is a window, and a call in which it would not hold.
    """
    if window is not None and not all(call.causal for call in calls):
        raise ValueError("pieces are not met as a whole through a window")
    rules = _Rules(tuple(calls), scale, window, kernel or FlashAttention())
    return cast(Tensor, _Attention.apply(query, key, value, sinks, rules))


class _Rules(NamedTuple):
    """As of `attend_pieces`."""

    calls: tuple[Call, ...]
    scale: float
    window: int | None
    kernel: FlashAttention


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, rules: _Rules
    ) -> Tensor:
        def made(call: Call) -> tuple[Tensor, Tensor]:
            given = query[call.asking], key[call.met], value[call.met]
            return rules.kernel.forward(*given, call.runs, call.causal, rules.scale, rules.window)

        levels = [call for call in rules.calls if not call.causal]
        output, sums = _joined([made(call) for call in rules.calls if call.causal])
        # What gets one factor and no part beside needs no copy in float32.
        merged = output.float() if levels else output
        if sinks is not None:
            after = torch.logaddexp(sums, sinks.float()[:, None])
            merged.mul_(_shares(sums, after))
            sums = after
        for call in levels:
            part, found = made(call)
            before = sums[:, call.asking]
            after = torch.logaddexp(before, found)
            merged[call.asking] = merged[call.asking] * _shares(before, after) + part * _shares(found, after)
            sums[:, call.asking] = after
        output = merged.to(output.dtype)
        ctx.save_for_backward(query, key, value, sinks, output, sums)
        ctx.rules = rules
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, sums = ctx.saved_tensors
        rules, above = ctx.rules, grads[0].contiguous()

        def found(call: Call) -> tuple[Tensor, Tensor, Tensor]:
            given = query[call.asking], key[call.met], value[call.met]
            made = output[call.asking], sums[:, call.asking].contiguous()
            how = call.runs, call.causal, rules.scale, rules.window
            return rules.kernel.backward(above[call.asking], given, made, *how)

        if len(rules.calls) == 1 and isinstance(rules.calls[0].met, slice):
            dquery, dkey, dvalue = found(rules.calls[0])
        else:
            dquery, dkey, dvalue = (
                torch.zeros_like(each, dtype=torch.float32) for each in (query, key, value)
            )
            for call in rules.calls:
                parts = found(call)
                _add(dquery, call.asking, parts[0])
                _add(dkey, call.met, parts[1])
                _add(dvalue, call.met, parts[2])
        dsinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            # Of a softmax whose last value is nothing: minus its share of what the others come to.
            inner = (above.float() * output).sum(-1).T
            dsinks = -((sinks.float()[:, None] - sums).exp() * inner).sum(-1).to(sinks.dtype)
        return dquery.to(query.dtype), dkey.to(key.dtype), dvalue.to(value.dtype), dsinks, None


def _joined(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """What calls came to whose tokens follow one another."""
    if len(parts) == 1:
        return parts[0]
    outputs, sums = zip(*parts, strict=True)
    return torch.cat(outputs), torch.cat(sums, dim=1)


def _add(total: Tensor, places: Tensor | slice, part: Tensor) -> None:
    """Adds to places of a float32 sum, of which some may be there several times."""
    if isinstance(places, slice):
        total[places] += part
    else:
        total.index_put_((places,), part.float(), accumulate=True)


def _shares(sums: Tensor, of: Tensor) -> Tensor:
    """What a call's output [T, heads, size] counts in the merged one: [T, heads, 1]."""
    return (sums - of).exp().T[..., None]
