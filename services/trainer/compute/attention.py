"""Attention over a flat batch: sequences end to end in one run of tokens, without padding.

Sequences that begin alike may be a tree of pieces there, in which what they share lies once.

Invariant: no token sees one that is not of its sequence, and each sequence's numbers are those of the model's
own attention on that sequence alone. An architecture for which that is not known to hold is not `is_flat`; it
computes one sequence at a time, as the library does. Linear attention, which carries a state from token to
token, is in recurrent/.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import signature
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from services.trainer.compute.memory.transfer import on_device
from services.trainer.compute.prefix.attention import Rules, attend_tree
from services.trainer.compute.prefix.calls import Call, levels_of, of_themselves, within_window
from services.trainer.compute.prefix.flash import attend_pieces
from services.trainer.compute.prefix.layout import Layout, TreeRun, Trees
from services.trainer.compute.recurrent.chunks import Levels
from services.trainer.compute.recurrent.convolution import Reach
from services.trainer.compute.recurrent.layers import begins_anew
from services.trainer.compute.split.asked import Asked
from services.trainer.compute.split.exchange import Exchange
from services.trainer.compute.split.share import Share

FLAT_ATTENTION = "tinsmith_flat"
"""Its name as transformers' `attn_implementation`."""

_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
# Fewer heads of keys than of queries are let through by torch 2.11 unasked, and by later ones for the asking.
_SHARED_HEADS: dict[str, Any] = {
    name: True for name in signature(varlen_attn).parameters if name == "enable_gqa"
}
_right_with_sinks: set[tuple[int, int, int]] = set()
"""Heads, those of keys, and their size, of which the kernel may have sinks."""
# Their frequencies depend on the longest sequence of a batch.
_ROPE_OF_THE_BATCH = {"dynamic", "longrope"}
_TRIED = (3, 70, 1, 5)
"""Lengths of sequences that linear attention is tried with: of more than one chunk, and of less."""


@dataclass(frozen=True)
class Sequences:
    """How a flat batch is cut.

    Attributes:
        lengths: tokens of each sequence, or of each piece of several, at least 1.
        offsets: int32 [lengths + 1], where each begins, and the end.
        positions: int64 [1, T], each token's place in its own sequence.
        trees: those of `Layout`: pieces that see others. Any other piece is a sequence.
        levels: the calls in which pieces that others continue are met; none on a CPU, which does not ask.
        longest: tokens of the longest sequence, as far as `laid_out` knows.
        split: the batch is this rank's part of one sequence.
        asked: each layer notes here what it asks for.
    """

    lengths: tuple[int, ...]
    offsets: Tensor
    positions: Tensor
    trees: Trees = ()
    levels: tuple[Call, ...] = ()
    longest: int = 0
    split: Split | None = None
    asked: list[Asked] | None = None

    @classmethod
    def of(cls, lengths: Sequence[int], device: str) -> Sequences:
        """Sequences of these lengths, one after the other."""
        sizes = torch.tensor(lengths)
        ends = sizes.cumsum(0)
        positions = torch.arange(int(ends[-1])) - (ends - sizes).repeat_interleave(sizes)
        offsets = nn.functional.pad(ends, (1, 0)).int()
        return cls(tuple(lengths), on_device(offsets, device), on_device(positions[None], device))

    @classmethod
    def laid_out(cls, layout: Layout, device: str) -> Sequences:
        """How a layout is cut."""
        offsets = nn.functional.pad(torch.tensor(layout.lengths).cumsum(0), (1, 0)).int()
        positions = torch.from_numpy(layout.positions)[None]
        levels = levels_of(layout.lengths, layout.trees, device) if layout.trees and device != "cpu" else ()
        places = on_device(offsets, device), on_device(positions, device)
        longest = int(layout.positions.max()) + 1
        return cls(layout.lengths, *places, layout.trees, levels, longest)

    @classmethod
    def part(cls, share: Share, exchange: Exchange, device: str) -> Sequences:
        """A rank's part of one sequence. What fills it up stands where the last token does."""
        own = cls.of([share.size], device)
        positions = (own.positions + share.rank * share.size).clamp(max=share.whole - 1)
        whole = cls.of([share.size * share.ranks], device)
        return replace(own, positions=positions, split=Split(exchange, share, whole))

    @cached_property
    def chunks(self) -> Levels:
        """How a recurrence goes through them, made for the first layer that asks."""
        return Levels.of(self.lengths, self.trees, str(self.offsets.device))

    def reach(self, back: int) -> Reach:
        """What a convolution runs over that reaches so many tokens back, made for the first that asks."""
        if back not in self._reaches:
            self._reaches[back] = Reach.of(back, self.lengths, self.trees, str(self.offsets.device))
        return self._reaches[back]

    @cached_property
    def _reaches(self) -> dict[int, Reach]:
        return {}

    def calls(self, window: int | None) -> tuple[Call, ...]:
        """Those of a kernel, made for the first layer that asks with this window (see `window_of`)."""
        if window not in self._calls:
            device = str(self.offsets.device)
            if window is None or not self.trees:
                own = of_themselves(self.lengths, self.offsets, device)
                self._calls[window] = (*own, *self.levels)
            else:
                self._calls[window] = within_window(window, self.lengths, self.trees, device)
        return self._calls[window]

    @cached_property
    def _calls(self) -> dict[int | None, tuple[Call, ...]]:
        return {}

    def runs(self) -> Iterator[tuple[int, int] | TreeRun]:
        """What is computed at once, in order: neighbours of equal length (length, how many), or a tree."""
        done = 0
        for first, tree in (*self.trees, (len(self.lengths), None)):
            for length, group in groupby(self.lengths[done:first]):
                yield length, sum(1 for _ in group)
            if tree is not None:
                yield tree
                done = first + len(tree.lengths)


@dataclass(frozen=True)
class Split:
    """A sequence of which each rank has a part.

    Attributes:
        share: this rank's.
        whole: the one sequence, as attention gets it.
    """

    exchange: Exchange
    share: Share
    whole: Sequences

    def own_heads(self, values: Tensor) -> Tensor:
        """Those of the heads that this rank computes for the whole sequence, of values of all heads."""
        return values.chunk(self.share.ranks)[self.share.rank]


def register() -> None:
    """Makes transformers know `FLAT_ATTENTION`. Calling it again changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(FLAT_ATTENTION, attend)
    AttentionMaskInterface.register(FLAT_ATTENTION, window_of)


def is_flat(model_class: Any, config: Any) -> bool:
    """Whether `FLAT_ATTENTION` is exact for an architecture: attention, full or over a sliding window, is all
    that connects its tokens, or linear attention that is known to begin anew with each sequence.

    Args:
        model_class: transformers' class of the causal language model.
        config: its text configuration.
    """
    kinds = set(getattr(config, "layer_types", None) or [_FULL])
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [settings for settings in rope.values() if isinstance(settings, dict)] or [rope]
    if (
        not getattr(model_class, "_supports_flash_attn", False)
        or not kinds <= {_FULL, _SLIDING, _LINEAR}
        or any(settings.get("rope_type") in _ROPE_OF_THE_BATCH for settings in nested)
    ):
        return False
    if _LINEAR in kinds:
        return begins_anew(model_class, config, Sequences.of(_TRIED, "cpu"))
    attends = getattr(model_class, "_supports_attention_backend", False)
    return attends and not getattr(model_class, "_is_stateful", False)


def window_of(*, local_size: int | None = None, use_vmap: bool = False, **_: Any) -> int | None:
    """What a layer gets as its mask: the tokens that each sees, itself included; None = all before it.

    Raises:
        ValueError: the model masks in a way of its own.
    """
    if use_vmap:
        raise ValueError("the model masks its attention in a way that a flat batch cannot follow")
    return local_size


def give_kernel_sinks(heads: int, key_heads: int, size: int) -> None:
    """Has the kernel compute attention of this shape with sinks too, which it does not before. All ranks call
    it, once that was found right."""
    _right_with_sinks.add((heads, key_heads, size))


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: int | None,
    *,
    sequences: Sequences,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence, as transformers calls it.

    Args:
        query: [1, heads, T, head size]; `key` and `value` may have fewer heads, `value` another size.
        attention_mask: a window, see `window_of`. Some architectures give it by name.
        options: what else the architecture passes. A soft cap of the scores ("softcap") is computed by its
            own plain attention, and so are attention sinks ("s_aux") unless the kernel was given them.

    Returns:
        [1, T, heads, head size of `value`].
    """
    window, sinks = attention_mask, options.get("s_aux")
    bare = all(options.get(name) is None for name in ("softcap", "position_bias"))
    could, plain = bare and _has_kernel(query, value), bare and sinks is None
    kernel = could and (sinks is None or _shape(query, key) in _right_with_sinks)
    if sequences.asked is not None:
        sequences.asked.append(_asked(query, key, value, window, kernel, plain, could and not plain))
    if sequences.split is not None:
        whole = sequences.split.whole
        if sinks is not None:
            options["s_aux"] = sequences.split.own_heads(sinks)

        def within(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return attend(module, query, key, value, window, sequences=whole, scaling=scaling, **options)[0]

        return sequences.split.exchange.attend(within, query, key, value), None
    if kernel and plain and not sequences.trees:
        return _fused(query, key, value, window, sequences, scaling), None
    if kernel and (sequences.levels or not sequences.trees):
        return _pieces(query, key, value, window, sequences, scaling, sinks), None
    runs = list(sequences.runs())
    sizes = [run.tokens if isinstance(run, TreeRun) else run[0] * run[1] for run in runs]
    split = (tensor.split(sizes, dim=2) for tensor in (query, key, value))
    outputs = []
    for run, positions, *parts in zip(runs, sequences.positions[0].split(sizes), *split, strict=True):
        if isinstance(run, TreeRun):
            outputs.append(_tree(run, positions, parts, window, scaling, options))
            continue
        length, count = run
        stacked = [_stack(part, length, count) for part in parts]
        seen = _seen(length, window, query.device)
        if plain:
            output = _sdpa(module, stacked, seen, scaling)
        else:
            output = _own(module, stacked, seen, scaling, options)
        outputs.append(output.reshape(1, length * count, *output.shape[2:]))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1), None


def _asked(
    query: Tensor, key: Tensor, value: Tensor, window: int | None, kernel: bool, plain: bool, sinks: bool
) -> Asked:
    heads, key_heads = query.shape[1], key.shape[1]
    elements = heads * (query.shape[3] + value.shape[3]) + key_heads * (key.shape[3] + value.shape[3])
    return Asked(heads, key_heads, elements, window, kernel, plain, sinks)


def _shape(query: Tensor, key: Tensor) -> tuple[int, int, int]:
    return query.shape[1], key.shape[1], query.shape[3]


def _has_kernel(query: Tensor, value: Tensor) -> bool:
    """Whether FlashAttention computes it, sinks aside."""
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] == value.shape[-1] <= 256
        and query.shape[-1] % 8 == 0
    )


def _fused(
    query: Tensor, key: Tensor, value: Tensor, window: int | None, sequences: Sequences, scaling: float | None
) -> Tensor:
    longest = max(sequences.lengths)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    output = varlen_attn(
        q,
        k,
        v,
        sequences.offsets,
        sequences.offsets,
        longest,
        longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        **(_SHARED_HEADS if key.shape[1] != query.shape[1] else {}),
    )
    assert isinstance(output, Tensor)
    return output[None]


def _pieces(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    sequences: Sequences,
    scaling: float | None,
    sinks: Tensor | None,
) -> Tensor:
    if sequences.trees and window is not None and window >= sequences.longest:
        window = None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return attend_pieces(q, k, v, sequences.calls(window), scale, window=window, sinks=sinks)[None]


def _tree(
    tree: TreeRun,
    positions: Tensor,
    parts: Sequence[Tensor],
    window: int | None,
    scaling: float | None,
    options: dict[str, Any],
) -> Tensor:
    if options.get("position_bias") is not None:
        raise RuntimeError("the model adds to its scores what a shared prefix cannot have")
    query, key, value = (part[0] for part in parts)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rules = Rules(scale, window, options.get("softcap"))
    made = attend_tree(query, key, value, positions, tree, rules, options.get("s_aux"))
    # As of the library's attention: some architectures view what they get.
    return made.transpose(0, 1).contiguous()[None]


def _stack(part: Tensor, length: int, count: int) -> Tensor:
    """[1, heads, count * length, size] as [count, heads, length, size]."""
    return part.view(part.shape[1], count, length, part.shape[3]).transpose(0, 1)


def _seen(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """bool [length, length], who sees whom; None where that is all that came before."""
    if window is None or length <= window:
        return None
    everyone = torch.ones(length, length, dtype=torch.bool, device=device)
    return everyone.tril().triu(1 - window)


def _sdpa(module: nn.Module, stacked: Sequence[Tensor], seen: Tensor | None, scaling: float | None) -> Tensor:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    mask = None if seen is None else seen[None, None]
    return sdpa_attention_forward(module, *stacked, mask, scaling=scaling, is_causal=True)[0]


def _own(
    module: nn.Module,
    stacked: Sequence[Tensor],
    seen: Tensor | None,
    scaling: float | None,
    options: dict[str, Any],
) -> Tensor:
    """The architecture's attention in plain PyTorch."""
    query = stacked[0]
    length = query.shape[2]
    if seen is None:
        seen = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    mask = torch.zeros(1, 1, length, length, dtype=query.dtype, device=query.device)
    mask.masked_fill_(~seen, torch.finfo(query.dtype).min)
    compute = sys.modules[type(module).__module__].eager_attention_forward
    output: Tensor = compute(module, *stacked, mask, scaling=scaling, **{**options, "dropout": 0.0})[0]
    return output
