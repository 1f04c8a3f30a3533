"""AdamW over one adapter's flat tensor, with every setting given anew for each step.

Invariant: a step depends only on the masters, the moments, the step count and the step's own gradient and
settings; `export` and `restore` carry moments and count bit for bit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from services.trainer.compute.data import AdamSpec

_BLOCK = 2**15
"""Elements whose float64 copy stays in a core's cache."""

KEPT_BYTES = 256 * 1024**2


class FlatBuffers:
    """Flat float32 tensors of one device that are used again, by size. One thread uses them.

    On CPUs a fresh tensor of some megabytes costs as much as several passes over it, since the kernel clears
    it page after page; an optimizer step of a small adapter would spend most of its time on that.

    Invariant: a tensor has one user at a time, and what lies unused is bounded.
    """

    def __init__(self, device: str | torch.device, kept_bytes: int = KEPT_BYTES) -> None:
        self._device = device
        self._left = kept_bytes
        self._unused: dict[int, list[Tensor]] = {}

    def take(self, elements: int) -> Tensor:
        """float32 [elements], with whatever is in it."""
        unused = self._unused.get(elements)
        if not unused:
            return torch.empty(elements, dtype=torch.float32, device=self._device)
        self._left += unused[-1].nbytes
        return unused.pop()

    def give(self, tensor: Tensor) -> None:
        """Takes a tensor back that nobody uses any more."""
        if tensor.nbytes <= self._left:
            self._left -= tensor.nbytes
            self._unused.setdefault(tensor.numel(), []).append(tensor)


class AdapterOptimizer:
    """torch.optim.AdamW (decoupled weight decay) of one flat float32 tensor.

    Args:
        buffers: where a step gets its scratch from.
    """

    def __init__(self, flat: Tensor, buffers: FlatBuffers) -> None:
        self._flat = flat
        self._buffers = buffers
        # One sweep over the tensors: the step of a small model costs as much as its memory traffic.
        self._adam = torch.optim.AdamW([flat], fused=True)

    @property
    def steps(self) -> int:
        """Steps taken."""
        state = self._adam.state.get(self._flat)
        return int(state["step"].item()) if state else 0

    def step(self, gradient: Tensor, adam: AdamSpec) -> dict[str, float]:
        """Clips `gradient` (flat, changed in place) to the global norm and applies it.

        Returns:
            grad_norm (global L2 norm before clipping), learning_rate, update_norm (L2 norm of the change).

        Raises:
            FloatingPointError: the gradient is not finite; nothing was applied.
        """
        norm = _norm(gradient)
        if not norm < float("inf"):
            raise FloatingPointError(f"gradient norm is {norm}")
        if adam.grad_clip_norm > 0:
            gradient.mul_(min(1.0, adam.grad_clip_norm / (norm + 1e-6)))
        self._adam.param_groups[0].update(
            lr=adam.learning_rate,
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
            weight_decay=adam.weight_decay,
        )
        before = self._buffers.take(self._flat.numel()).copy_(self._flat)
        self._flat.grad = gradient
        self._adam.step()
        self._flat.grad = None
        change = _norm(before.sub_(self._flat))
        self._buffers.give(before)
        return {"grad_norm": norm, "learning_rate": adam.learning_rate, "update_norm": change}

    def export(self) -> tuple[int, dict[str, Tensor]]:
        """Step count and the flat moments ("exp_avg", "exp_avg_sq"); no moments before the first step."""
        state = self._adam.state.get(self._flat)
        if not state:
            return 0, {}
        return self.steps, {"exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}

    def restore(self, steps: int, moments: dict[str, Tensor]) -> None:
        """Takes over what `export` gave."""
        self._adam.state.clear()
        if steps:
            self._adam.state[self._flat] = {
                "step": torch.tensor(float(steps), device=self._flat.device),
                "exp_avg": moments["exp_avg"].to(self._flat).clone(),
                "exp_avg_sq": moments["exp_avg_sq"].to(self._flat).clone(),
            }


def _norm(values: Tensor) -> float:
    """L2 norm of a flat tensor, summed up in float64.

    On CPUs block by block: torch.linalg.vector_norm takes ten times as long for that, and a float64 copy of
    the whole would have to be fetched from fresh memory.
    """
    blocks = values.split(_BLOCK if values.device.type == "cpu" else values.numel())
    return math.sqrt(float(torch.stack([block.double().square_().sum() for block in blocks]).sum()))
