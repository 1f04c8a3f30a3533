"""Has the base model compute with adapters: hooks on its linears and experts add those of a micro-batch, in
as many kernels for many adapters as for a few.

Invariant: each token meets its own adapter and no other. Without a micro-batch that is routed the base model
computes as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from services.trainer.compute.lora.adapter import HEAD
from services.trainer.compute.lora.experts import adapted_experts
from services.trainer.compute.lora.products import Cut, add_products, product
from services.trainer.compute.lora.stack import Segment, Stack, scaled
from services.trainer.compute.memory.buffers import FlatBuffers


class _Adapted(torch.autograd.Function):
    """Adds x A^T B^T * scale to `output`, with each token's own A, B and scale. `output` may be of more
    precision than x and the matrices, as logits are: what is added to it has theirs."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, x: Tensor, _anchor: Tensor, stack: Stack, name: str, cut: Cut
    ) -> Tensor:
        flat, made = x.reshape(-1, x.shape[-1]), output.view(-1, output.shape[-1])
        a, b = _matrices(stack, name, cut)
        low = product(flat, a.transpose(1, 2), cut.groups)
        # One number for all tokens goes into a product; others are multiplied here.
        scale = cut.scale
        if isinstance(scale, Tensor):
            low.mul_(scale)
            scale = 1.0
        ctx.save_for_backward(x, low)
        ctx.stack, ctx.name, ctx.cut, ctx.left = stack, name, cut, scale
        # What the linear made is nobody's but ours, and a copy of it takes as long as what is computed here.
        ctx.mark_dirty(output)
        add_products(made, low, b.transpose(1, 2), cut.groups, scale)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, low = ctx.saved_tensors
        stack, name, cut = ctx.stack, ctx.name, ctx.cut
        a, b = _matrices(stack, name, cut)
        # A sum's gradient is one number seen everywhere, which a kernel does not take for a matrix.
        above = grad.reshape(-1, grad.shape[-1]).to(x.dtype).contiguous()
        flat = x.reshape(-1, x.shape[-1])
        inner = scaled(product(above, b, cut.groups), cut.scale)
        stack.accumulate(f"{name}.lora_B", above, low, cut.groups, ctx.left, cut.adapters)
        stack.accumulate(f"{name}.lora_A", inner, flat, cut.groups, some=cut.adapters)
        below = None
        if ctx.needs_input_grad[1]:
            below = product(inner, a, cut.groups).view_as(x)
        return grad, below, None, None, None, None


class LoraRouter:
    """Tells the hooks which tokens of the current micro-batch use which adapter.

    Args:
        buffers: what stacks are made in.
    """

    def __init__(self, buffers: FlatBuffers | None = None) -> None:
        self._buffers = buffers or FlatBuffers()
        self._stack: Stack | None = None

    @contextmanager
    def route(self, segments: Sequence[Segment]) -> Iterator[None]:
        """Routes forward and backward passes within the context; the segments tile the batch's tokens. Its
        gradients are the operations' once it ends without an exception, and else nothing happened to them,
        but that what is in fresh ones may be something else."""
        if not segments:
            yield
            return
        self._stack = stack = Stack(segments, self._buffers)
        try:
            yield
            stack.commit()
            stack.release()
        finally:
            self._stack = None

    def hook(self, linear: nn.Linear, name: str) -> None:
        """Makes `linear` add the routed adapters' matrices of this name to its output."""

        def add_adapters(_module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            return self._add(name, args[0], output)

        linear.register_forward_hook(add_adapters)

    def hook_experts(self, experts: nn.Module, name: str) -> None:
        """Makes routed experts compute with the routed adapters' matrices of this name."""
        plain = experts.forward

        def forward(hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            stack = self._stack
            if stack is None or not stack.has(f"{name}.w1"):
                return cast(Tensor, plain(hidden, chosen, weights))
            self._check(name, hidden, stack)
            return adapted_experts(experts, name, stack, hidden, chosen, weights)

        experts.forward = forward

    def add_to_logits(self, start: int, hidden: Tensor, logits: Tensor) -> Tensor:
        """What the output head made of `hidden` [tokens, hidden], the tokens from `start` on, with their
        adapters added."""
        stack = self._stack
        if stack is None or not stack.has(HEAD):
            return logits
        cut = stack.cut(start, start + hidden.shape[0])
        return _adapted(stack, HEAD, hidden, logits, cut)

    def values(self, hidden: Tensor) -> Tensor:
        """Value of each token, by the value head of its segment.

        Args:
            hidden: [V, hidden], the tokens of the routed critics' segments one after the other.

        Returns:
            float32 [V].
        """
        return hidden.float().sum(-1) if self._stack is None else self._stack.values(hidden)

    def _add(self, name: str, x: Tensor, output: Tensor) -> Tensor:
        stack = self._stack
        if stack is None or not stack.has(name):
            return output
        self._check(name, x, stack)
        return _adapted(stack, name, x, output, stack.whole)

    @staticmethod
    def _check(name: str, x: Tensor, stack: Stack) -> None:
        given = x.numel() // x.shape[-1]
        if given != stack.tokens:
            raise RuntimeError(f"{name} was given {given} tokens of a batch of {stack.tokens}")


def _matrices(stack: Stack, name: str, cut: Cut) -> tuple[Tensor, Tensor]:
    """A and B of each adapter that has tokens."""
    return stack.matrices(f"{name}.lora_A")[cut.adapters], stack.matrices(f"{name}.lora_B")[cut.adapters]


def _adapted(stack: Stack, name: str, x: Tensor, output: Tensor, cut: Cut) -> Tensor:
    if output._is_view():
        # A linear with a bias makes one. Autograd follows what changes a view by more copies than this one.
        output = output.clone()
    return cast(Tensor, _Adapted.apply(output, x, stack.anchor, stack, name, cut))
