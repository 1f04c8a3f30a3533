"""What a rank can hold: arithmetic over the shapes of a model.

Per token and block the backward pass keeps what goes into and comes out of each linear, and about a third as
much again: norms, activations, rotations. The factor is checked against what PyTorch keeps, see
tests/unit/trainer/compute/memory/test_capacity.py. Linear attention computes in float32, and keeps far more
than its linears do. With activation checkpointing a block keeps its input alone, and one block at a time is
computed again. Attention by matrices of scores, which an architecture has with capped scores, or where no
kernel computes it (with sinks most do not), keeps those too, as many as the square of the tokens, and so do
the masks of a sliding window where no kernel goes without them, in a sequence that is longer than the window.

What only runs forward keeps one block's activations at a time, and no gradient; but scores and masks of that
block grow with the square of its tokens all the same, so that it has a longest sequence too.

Of a sequence that all ranks compute together each has an equal part, and beside it what the exchange around
attention takes: queries, keys, values and outputs, as they are sent and as they come, while a block is
computed, and the outputs as long as the block's activations.

What weights and head leave is for sequences, but for a third, which is for adapters: those of other models
are resident while one computes. Models that train all weights are not counted: how many there are the
operator says (`--max-full-models`).
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from services.trainer.compute.exchange import least
from services.trainer.compute.logprobs import CHUNK_ELEMENTS
from services.trainer.compute.lora.adapter import LinearShape, layout_of
from services.trainer.compute.lora.parts import Part
from services.trainer.compute.recurrent.layers import is_recurrent, kept_bytes
from services.trainer.compute.split.asked import Asked

log = logging.getLogger(__name__)

GIB = 2**30

ADAPTERS = 1 / 3
"""Of what weights and head leave, adapters get so much."""

PROCESS_BYTES = GIB // 2
"""That is left to what torch's allocator does not give: libraries, their kernels, communicators."""
_LEAST = 1 / 16
"""Of the memory. The arithmetic is too coarse to say that nothing fits."""
_BESIDE_LINEARS = 1.3
_AROUND = 4
"""Hidden states that are kept before the first block and after the last one."""
ADAPTER_MOMENTS = 2
"""float32 numbers of each element: Adam's moments."""
ADAPTER_GRADIENTS = 2
"""The same: the gradient since the last step and that of an operation which is not complete."""
_MASKS = 3
"""Boolean matrices that exist while the mask of a window is made."""
COPIES = 2
"""Of what is exchanged, beside what attention takes anyway: as it is sent and as it comes."""
_LOSS_BYTES = 256
"""Of each token of a sequence that all ranks compute together, on each of them: ids, the loss's inputs, and
what it computes in double precision."""
_HOST_BYTES = 256
"""Of a token that was sent, on rank 0: tokens, targets, weights and results, as bytes of messages and as
tensors."""


@dataclass(frozen=True)
class Footprint:
    """What a model takes of a rank, in bytes.

    Attributes:
        weights: those of the frozen base.
        token: of each token of a micro-batch, until its backward pass.
        square: of each pair of tokens of one sequence.
        masks: the same beside it, where the sequence has more than `window` tokens.
        exchange: of each token that a rank has of a sequence which all compute together, beside `token`.
        block: what a block adds to each token that keeps its activations where others compute theirs again;
            0 where it grows with the square of the tokens.
        forward: what a sequence takes that has no backward pass; None: the same.
    """

    weights: int
    token: float
    square: float = 0.0
    masks: float = 0.0
    window: int = 0
    exchange: float = 0.0
    block: float = 0.0
    forward: Footprint | None = None

    def tokens(self, room: float) -> int:
        """The longest sequence that takes no more than `room` bytes."""
        anywhere = self._tokens(room, self.square + self.masks)
        return max(anywhere, min(self.window, self._tokens(room, self.square)))

    def of_one(self, tokens: int) -> float:
        """Bytes that one rank takes for a sequence."""
        pairs = self.square + (self.masks if tokens > self.window else 0)
        return tokens * self.token + tokens**2 * pairs

    def together(self, room: float, ranks: int) -> int:
        """The longest sequence of which so many ranks take no more than `room` bytes each."""
        return int(max(room, 0) / self.of_each(1, ranks))

    def of_each(self, tokens: int, ranks: int) -> float:
        """Bytes that each of so many ranks takes for a sequence which they compute together."""
        return tokens * ((self.token + self.exchange) / ranks + _LOSS_BYTES)

    def _tokens(self, room: float, square: float) -> int:
        if square:
            root = math.sqrt(self.token**2 + 4 * square * max(room, 0))
            return int((root - self.token) / (2 * square))
        return int(max(room, 0) / self.token)


@dataclass(frozen=True)
class Capacity:
    """What a trainer can hold.

    Attributes:
        one_rank_tokens: of the longest sequence, on one rank.
        sequence_tokens: of the longest one on all ranks together; the same where they cannot.
        forward_tokens: of the longest that only runs forward, which one rank computes.
        operation_tokens: of all sequences of one operation.
        adapter_bytes: that adapters, their gradients and their moments may take of each rank.
        adapter_host_bytes: that those which are idle may take of each rank's host.
    """

    one_rank_tokens: int
    sequence_tokens: int
    forward_tokens: int
    operation_tokens: int
    adapter_bytes: int
    adapter_host_bytes: int = 0

    @property
    def split_beyond(self) -> int:
        """Tokens beyond which all ranks compute a sequence together; 0 = they never do."""
        return self.one_rank_tokens if self.sequence_tokens > self.one_rank_tokens else 0


def capacity(
    memory: int,
    host: int,
    footprint: Footprint,
    context_length: int,
    vocab_size: int,
    micro_batch_tokens: int,
    ranks: int = 1,
) -> Capacity:
    """What fits. Of a sequence that ranks compute together it is what `needed` says, where anything is left
    beside weights and head.

    Args:
        memory: bytes that a rank may take, of its device.
        host: bytes that the data of one operation may take of the first rank's host.
        context_length: most tokens of a sequence, whatever the memory.
        vocab_size: of the output head.
        micro_batch_tokens: up to which several sequences are computed at once.
        ranks: that can compute a sequence together; 1 = each is computed by one.
    """
    # Of the longest sequence there could be: how long one may become follows from what the head leaves.
    head = head_bytes(max(context_length, micro_batch_tokens), vocab_size)
    left = memory - footprint.weights - head - PROCESS_BYTES
    room = max(left, int(memory * _LEAST))
    if room != left:
        log.warning(
            "%.1f GiB of memory are little for a model of %.1f GiB; see --memory-gib",
            memory / GIB,
            footprint.weights / GIB,
        )
    for_tokens = room * (1 - ADAPTERS)
    alone = max(1, min(context_length, footprint.tokens(for_tokens)))
    # What can be trained can run forward, whatever the arithmetic says of either.
    forward = max(alone, min(context_length, (footprint.forward or footprint).tokens(for_tokens)))
    together = alone
    if ranks > 1:
        together = max(alone, min(context_length, footprint.together(for_tokens, ranks)))
    of_all = max(host // _HOST_BYTES, together)
    return Capacity(alone, together, forward, of_all, int(room * ADAPTERS))


def needed(footprint: Footprint, tokens: int, vocab_size: int, ranks: int) -> int:
    """Bytes that each of so many ranks needs for a sequence which they compute together."""
    return int(footprint.of_each(tokens, ranks)) + head_bytes(-(-tokens // ranks), vocab_size)


def head_bytes(tokens: int, vocab_size: int) -> int:
    """What the output head takes at a time of a run of so many tokens: of more logits than a chunk has, one
    chunk counts."""
    return 2 * 4 * min(CHUNK_ELEMENTS, tokens * vocab_size)


def steady(found: Capacity, context_length: int) -> Capacity:
    """The same with less of the last digits: what is measured, or free, is never quite the same at the next
    start, and what clients were promised should be. It takes at most an eighth away, and nothing of a whole
    context."""

    def rounded(tokens: int) -> int:
        step = 1 << max(0, tokens.bit_length() - 4)
        return tokens if tokens == context_length else tokens // step * step

    return dataclasses.replace(
        found,
        one_rank_tokens=rounded(found.one_rank_tokens),
        sequence_tokens=rounded(found.sequence_tokens),
        forward_tokens=rounded(found.forward_tokens),
    )


def at_least(found: Capacity, sequence_tokens: int, one_adapter: int) -> Capacity:
    """What is promised where nobody said how much memory there is: arithmetic that goes by what the machine
    has is no reason to refuse what every trainer has to do."""
    least = Capacity(
        max(found.one_rank_tokens, sequence_tokens),
        max(found.sequence_tokens, sequence_tokens),
        max(found.forward_tokens, sequence_tokens),
        max(found.operation_tokens, sequence_tokens),
        max(found.adapter_bytes, one_adapter),
    )
    if least != found:
        log.warning(
            "by arithmetic its share of the machine holds sequences of %d tokens and %.2f GiB of adapters; "
            "%d tokens and %.2f GiB are let in all the same; see --memory-gib",
            found.one_rank_tokens,
            found.adapter_bytes / GIB,
            least.one_rank_tokens,
            least.adapter_bytes / GIB,
        )
    return least


def warn_of_halves(found: Capacity, micro_batch_tokens: int, context_length: int) -> None:
    """Says so where full micro-batches will be refused memory, as far as the longest sequence tells."""
    if found.one_rank_tokens < min(micro_batch_tokens, context_length):
        log.warning(
            "micro-batches are of up to %d tokens, and memory holds about %d: fuller ones are refused memory "
            "and run in halves, which takes time; see --micro-batch-tokens",
            micro_batch_tokens,
            found.one_rank_tokens,
        )


def least_of_all(mine: Capacity, device: str) -> Capacity:
    """What every rank can hold; all ranks call it."""
    return Capacity(*least(list(dataclasses.astuple(mine)), device))


def footprint(
    model: Any, item: int, *, checkpointing: bool, ranks: int, asked: Sequence[Asked] = ()
) -> Footprint:
    """Arithmetic over a causal language model.

    Args:
        model: transformers' model, perhaps with weights that ZeRO-3 sharded.
        item: bytes of one of its elements.
        checkpointing: of each block only the input is kept.
        ranks: that share its weights; 1 = each has them all.
        asked: what each layer asks of attention, as far as that is known.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    text = model.config.get_text_config()
    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    active = getattr(text, "num_experts_per_tok", None) or 1
    each = [
        _BESIDE_LINEARS * item * _width(block, active) + _of_linear_attention(block, item)
        for block in blocks or [model]
    ]
    hidden = text.hidden_size * item
    kept = len(each) * hidden + max(each) if checkpointing and blocks else sum(each)
    elements = sum(math.prod(_shape(parameter)) for parameter in model.parameters()) // ranks
    # Blocks that have theirs at once, until the backward pass.
    until = 1 if checkpointing else len(each)
    # Scores, their softmax and its gradient.
    square = 3 * 4 * text.num_attention_heads if _has_scores(model, text, asked) else 0
    windows = [layer.window for layer in asked if layer.masked and layer.window is not None]

    def masks(blocks: int) -> float:
        # Who sees whom as it is made, and of each block as what is added to scores.
        return _MASKS + min(blocks, len(windows)) * item if windows else 0.0

    exchanged = [item * layer.elements for layer in asked]
    exchange = COPIES * max(exchanged, default=0) + (0 if checkpointing else sum(exchanged) / 2)
    around, window = _AROUND * hidden, min(windows, default=0)
    forward = Footprint(elements * item, max(each) + around, square, masks(1), window)
    return Footprint(
        elements * item,
        kept + around,
        square * until,
        masks(until),
        window,
        exchange,
        max(each) if checkpointing and blocks and not square and not windows else 0.0,
        forward,
    )


def adapter_bytes(targets: dict[str, LinearShape], rank: int, value_head: int, item: int, ranks: int) -> int:
    """What an adapter takes of each rank, its gradients and moments included.

    Args:
        value_head: its elements, 0 = none.
        item: bytes of an element of the base model, in which there is a copy unless it is float32.
        ranks: that have a part of it each; the shorter ones are filled up.
    """
    _, elements = layout_of(targets, rank, value_head)
    of_all, of_part = adapter_element_bytes(item)
    part = Part(elements, ranks)
    # Values are computed in float32, of masters that no rank has all of.
    head = 4 * value_head if item != 4 and ranks > 1 else 0
    return part.padded * of_all + part.elements * of_part + head


def adapter_host_bytes(
    targets: dict[str, LinearShape], rank: int, value_head: int, item: int, ranks: int
) -> int:
    """What an adapter takes of each rank's host while it is there, arguments as of `adapter_bytes`: all but
    the gradient of an operation which is not complete, and the stack of a micro-batch."""
    _, elements = layout_of(targets, rank, value_head)
    on_device = adapter_bytes(targets, rank, value_head, item, ranks)
    return on_device - Part(elements, ranks).padded * (4 + _stacked_bytes(item))


def adapter_element_bytes(item: int) -> tuple[int, int]:
    """What an element of an adapter takes of each rank: of each, its gradients and what computes, and both
    once more in the stack of a micro-batch (lora/stack.py); and of each that is of the rank's own part, its
    moments, and its master where what computes is a copy of `item` bytes.
    """
    copied = item != 4
    return 4 * ADAPTER_GRADIENTS + item + _stacked_bytes(item), 4 * (ADAPTER_MOMENTS + copied)


def _stacked_bytes(item: int) -> int:
    return item + 4


def _width(block: nn.Module, active: int) -> int:
    """Features that go into and come out of all linears of a block, of each token."""
    total = 0
    for module in block.modules():
        if isinstance(module, nn.Linear):
            total += module.in_features + module.out_features
        else:
            # Experts' weights in one tensor, of which a token meets few.
            shapes = [_shape(weight) for weight in module.parameters(recurse=False)]
            total += sum(active * (shape[1] + shape[2]) for shape in shapes if len(shape) == 3)
    return total


def _of_linear_attention(block: nn.Module, item: int) -> float:
    """Bytes that a block's linear attention keeps of each token, beside its linears."""
    return sum(kept_bytes(module, item) for module in block.modules() if is_recurrent(module))


def _shape(parameter: Any) -> tuple[int, ...]:
    """That of the whole weight, also where this rank has a part of it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _has_scores(model: Any, config: Any, asked: Sequence[Asked]) -> bool:
    """Whether attention goes by whole matrices of scores: as layers say that were asked, else by names."""
    if asked:
        return any(layer.scored for layer in asked)
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    # The library's choice for an architecture that nothing else computes.
    plain = config._attn_implementation == "eager"
    return plain or capped or any(name.endswith(".sinks") for name, _ in model.named_parameters())
