"""Log-probabilities of target tokens, computed without ever holding all the logits.

Invariant: the logits ([positions, vocabulary]) of at most one chunk, of `CHUNK_ELEMENTS` elements, exist at a
time, in the forward and in the backward pass; the log-softmax itself is always float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from services.trainer.compute.lora import LoraRouter, Part, add_adapters

CHUNK_ELEMENTS = 1 << 26
"""Logits in one chunk: 256 MiB of float32."""


class _SelectiveLogSoftmax(torch.autograd.Function):
    """log_softmax(logits)[targets]; saves the logits and one normaliser per position, no softmax."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        full = logits.float()
        normaliser = torch.logsumexp(full, dim=-1, keepdim=True)
        ctx.save_for_backward(logits, targets, normaliser)
        return full.gather(-1, targets) - normaliser

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        logits, targets, normaliser = ctx.saved_tensors
        result = torch.sub(logits, normaliser).exp_()
        result.mul_(-grad.sum(-1, keepdim=True)).scatter_add_(-1, targets, grad)
        return result.to(logits.dtype), None


def selective_log_softmax(logits: Tensor, targets: Tensor) -> Tensor:
    """Log-probability of each target.

    Args:
        logits: [P, vocabulary], any floating dtype.
        targets: int64 [P, K].

    Returns:
        float32 [P, K].
    """
    return cast(Tensor, _SelectiveLogSoftmax.apply(logits, targets))


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

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Log-probabilities.

        Args:
            hidden: [P, hidden], the positions of the routed segments one after the other.
            targets: int64 [P, K].

        Returns:
            float32 [P, K].
        """
        # One chunk alone is kept for the backward pass; of several, each is computed again there.
        recompute = torch.is_grad_enabled() and hidden.shape[0] > self.chunk_positions
        if not hidden.shape[0]:
            # Only critics' rows. Under ZeRO-3 the call as such matters: the other ranks gather the weight.
            return self._chunk(hidden, targets, [])
        outputs = []
        for low in range(0, hidden.shape[0], self.chunk_positions):
            chunk = slice(low, min(low + self.chunk_positions, hidden.shape[0]))
            parts = self._router.head_parts(chunk.start, chunk.stop)
            if recompute:
                output = checkpoint(
                    self._chunk,
                    hidden[chunk],
                    targets[chunk],
                    parts,
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
            else:
                output = self._chunk(hidden[chunk], targets[chunk], parts)
            outputs.append(output)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _chunk(self, hidden: Tensor, targets: Tensor, parts: Sequence[Part]) -> Tensor:
        logits = add_adapters(parts, hidden, F.linear(hidden, self.weight, self.bias))
        return selective_log_softmax(logits, targets)
