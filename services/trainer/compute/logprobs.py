"""Log-probabilities of target tokens, computed without ever holding all the logits.

Invariant: the logits ([positions, vocabulary]) of at most one chunk, of `CHUNK_ELEMENTS` elements, exist at a
time, in the forward and in the backward pass.
Where the loss's derivative by each log-probability follows from that one alone, a chunk is differentiated
right after it was computed, and nothing is computed twice.
Logits and their log-softmax are float32 whatever the model is, and were never rounded to less (an adapter's
part of them is). Targets are never padded: one position with many costs the others nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from services.trainer.compute.lora.grouped import LoraRouter

CHUNK_ELEMENTS = 1 << 26
"""Logits in one chunk: 256 MiB of float32."""


_CAST_ELEMENTS = 1 << 24
"""Weights of a low precision of which there is a float32 copy at a time, where the device needs one."""

Widths = tuple[tuple[int, int], ...]
"""Runs of positions that have equally many targets: (positions, targets of each)."""


Slope = Callable[[Tensor, slice], Tensor]
"""The derivative by log-probabilities of the loss that will be differentiated, from their values [q] and from
where they are among the Q targets."""


@dataclass(frozen=True)
class Targets:
    """The targets of P positions, which may have different numbers of them.

    Attributes:
        ids: int64 [Q], those of one position after the other.
        widths: the runs that make up the P positions and Q targets.
        slope: None where a log-probability's derivative depends on others too.
    """

    ids: Tensor
    widths: Widths
    slope: Slope | None = None

    @property
    def positions(self) -> int:
        """P."""
        return sum(count for count, _ in self.widths)

    def __getitem__(self, positions: slice) -> Targets:
        """Those of the positions from `positions.start` to `positions.stop`."""
        widths: list[tuple[int, int]] = []
        first = passed = start = 0
        for count, width in self.widths:
            before = min(max(positions.start - passed, 0), count)
            taken = min(max(positions.stop - passed, 0), count) - before
            if taken:
                start = start if widths else first + before * width
                widths.append((taken, width))
            first, passed = first + count * width, passed + count
        stop = start + sum(count * width for count, width in widths)
        return Targets(self.ids[start:stop], tuple(widths))


def shifted(slope: Slope | None, first: int) -> Slope | None:
    """The slope for who has the targets from `first` on and counts them from 0."""
    if slope is None:
        return None
    return lambda logprobs, where: slope(logprobs, slice(where.start + first, where.stop + first))


def multiplied(slope: Slope | None, factor: int) -> Slope | None:
    """The slope of a multiple of the loss."""
    return None if slope is None else lambda logprobs, where: slope(logprobs, where) * factor


class _SelectiveLogSoftmax(torch.autograd.Function):
    """log_softmax(logits)[targets]; saves the logits and one normaliser per position, no softmax."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, widths: Widths) -> Tensor:
        full = logits.float()
        normaliser = torch.logsumexp(full, dim=-1, keepdim=True)
        ctx.save_for_backward(logits, ids, normaliser)
        ctx.widths = widths
        found = [
            (full[rows].gather(-1, ids[flat].view(shape)) - normaliser[rows]).flatten()
            for rows, flat, shape in _runs(widths)
        ]
        return torch.cat(found) if found else full.new_zeros(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        logits, ids, normaliser = ctx.saved_tensors
        result = torch.sub(logits, normaliser).exp_()
        for rows, flat, shape in _runs(ctx.widths):
            above = grad[flat].view(shape)
            result[rows].mul_(-above.sum(-1, keepdim=True)).scatter_add_(-1, ids[flat].view(shape), above)
        return result.to(logits.dtype), None, None


class _Float32Logits(torch.autograd.Function):
    """hidden weight^T + bias in float32, also of operands that have less precision. Gradients have theirs.

    A weight has its gradient before its bias, as from `_Differentiated`: ZeRO-2 adds up what ranks have in
    the order in which they have it, and each of them may compute its head either way."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        if hidden.dtype == torch.float32:
            return F.linear(hidden, weight, bias)
        if hidden.is_cuda:
            logits = torch.mm(hidden, weight.T, out_dtype=torch.float32)
        else:
            rows = max(1, _CAST_ELEMENTS // weight.shape[1])
            full = hidden.float()
            logits = full.new_empty(hidden.shape[0], weight.shape[0])
            for part, made in zip(weight.split(rows), logits.split(rows, dim=1), strict=True):
                made.copy_(full @ part.float().T)
        return logits if bias is None else logits.add_(bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        grad = grads[0].to(weight.dtype)
        below, weights, biases = ctx.needs_input_grad
        return (
            grad @ weight if below else None,
            grad.T @ hidden if weights else None,
            grads[0].sum(0).to(weight.dtype) if biases else None,
        )


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """float32 [positions, vocabulary]."""
    return cast(Tensor, _Float32Logits.apply(hidden, weight, bias))


def _runs(widths: Widths) -> Iterator[tuple[slice, slice, tuple[int, int]]]:
    """Of each run the positions, the targets, and the shape [positions, targets of each]."""
    row = first = 0
    for count, width in widths:
        yield slice(row, row + count), slice(first, first + count * width), (count, width)
        row, first = row + count, first + count * width


def selective_log_softmax(logits: Tensor, targets: Targets) -> Tensor:
    """Log-probability of each target.

    Args:
        logits: [P, vocabulary], any floating dtype.
        targets: of the P positions, Q in all.

    Returns:
        float32 [Q].
    """
    return cast(Tensor, _SelectiveLogSoftmax.apply(logits, targets.ids, targets.widths))


class _Differentiated(torch.autograd.Function):
    """Log-probabilities whose backward pass was done: that of the loss of which the slope was."""

    @staticmethod
    def forward(ctx: Any, logprobs: Tensor, found: Sequence[Tensor], *given: Tensor) -> Tensor:
        ctx.save_for_backward(*found)
        return logprobs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.saved_tensors


class LogprobHead(nn.Module):
    """The output head of a language model, from hidden states straight to target log-probabilities.

    It holds the head's own parameters (also when they are tied to the embedding), is called once per
    forward, and adds each segment's `lm_head` adapter. Being one module call however many chunks there
    are, ZeRO-3 gathers the head's weight once in the forward and once in the backward pass.
    """

    def __init__(self, linear: nn.Linear, router: LoraRouter, chunk_elements: int = CHUNK_ELEMENTS) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.chunk_positions = max(1, chunk_elements // linear.out_features)
        self._router = router

    def forward(self, hidden: Tensor, targets: Targets) -> Tensor:
        """Log-probabilities.

        Args:
            hidden: [P, hidden], the tokens with targets of the routed segments one after the other.
            targets: of the P positions, Q in all.

        Returns:
            float32 [Q].
        """
        # One chunk alone is kept for the backward pass; of several, each is computed again there, unless that
        # can follow at once.
        recompute = torch.is_grad_enabled() and hidden.shape[0] > self.chunk_positions
        if recompute and targets.slope is not None:
            return self._at_once(hidden, targets, targets.slope)
        if not hidden.shape[0]:
            # Only critics' rows. Under ZeRO-3 the call as such matters: the other ranks gather the weight.
            return self._chunk(hidden, targets, 0)
        outputs = []
        for low in range(0, hidden.shape[0], self.chunk_positions):
            chunk = slice(low, min(low + self.chunk_positions, hidden.shape[0]))
            if recompute:
                output = checkpoint(
                    self._chunk,
                    hidden[chunk],
                    targets[chunk],
                    low,
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
            else:
                output = self._chunk(hidden[chunk], targets[chunk], low)
            outputs.append(output)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _at_once(self, hidden: Tensor, targets: Targets, slope: Slope) -> Tensor:
        learned = [each for each in self.parameters() if each.requires_grad]
        sums = [torch.zeros_like(each) for each in learned]
        below, outputs, first = torch.empty_like(hidden), [], 0
        for low in range(0, hidden.shape[0], self.chunk_positions):
            chunk = slice(low, min(low + self.chunk_positions, hidden.shape[0]))
            given = hidden[chunk].detach().requires_grad_()
            output = self._chunk(given, targets[chunk], low)
            where = slice(first, first + output.shape[0])
            outputs.append(output.detach())
            # The adapters have their gradients of the chunk now.
            below[chunk], *more = torch.autograd.grad(output, [given, *learned], slope(outputs[-1], where))
            # As large as the weights: popped, they are gone before the next chunk has its own.
            for each in reversed(sums):
                each += more.pop()
            first = where.stop
        if not hidden.requires_grad:
            # Nothing below the head is adapted. The loss has to have a backward pass nevertheless.
            hidden = hidden.detach().requires_grad_()
        return cast(Tensor, _Differentiated.apply(torch.cat(outputs), (below, *sums), hidden, *learned))

    def _chunk(self, hidden: Tensor, targets: Targets, start: int) -> Tensor:
        logits = _logits(hidden, self.weight, self.bias)
        if hidden.shape[0]:
            logits = self._router.add_to_logits(start, hidden, logits)
        return selective_log_softmax(logits, targets)
