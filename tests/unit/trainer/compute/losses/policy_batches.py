"""Sequences as a policy is trained on them, and a loss with its gradient, for the tests of losses."""

from __future__ import annotations

import torch

from services.trainer.compute.losses import LOSSES, Datums

CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
WIDE = {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}
TIGHT = {"clip_low_threshold": 0.97, "clip_high_threshold": 1.01}
POLICY_LOSSES = ["cispo", "dro", "gspo", "importance_sampling", "ppo"]
CLIPPED_LOSSES = ["ppo", "cispo", "gspo"]


def loss_and_gradient(
    name: str, lp: torch.Tensor, config: dict[str, float] | None = None, /, **inputs: torch.Tensor
) -> tuple[float, torch.Tensor]:
    leaf = lp.clone().requires_grad_()
    loss, _ = compute(name, leaf, inputs, config)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return float(loss.detach()), gradient


def compute(
    name: str, outputs: torch.Tensor, inputs: dict[str, torch.Tensor], config: dict[str, float] | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of one datum, and its parts of the metrics."""
    arrays = LOSSES[name].complete({key: value.numpy() for key, value in inputs.items()}, config or {})
    completed = {key: torch.from_numpy(array) for key, array in arrays.items()}
    losses, parts = LOSSES[name].compute(outputs.flatten(), completed, Datums.of([outputs.numel()], "cpu"))
    return losses[0], {key: part[0] for key, part in parts.items()}


def episode(name: str, seed: int = 0, drift: float = 0.3) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Learner's log-probabilities and inputs of 40 tokens, the first 10 of which are a prompt.

    Two of the sampled tokens have no advantage.
    """
    generator = torch.Generator().manual_seed(seed)
    sampled = torch.arange(40) >= 10
    lp = -torch.rand(40, generator=generator) * 4 - 0.1
    q = torch.where(sampled, lp - torch.randn(40, generator=generator) * drift, 0.0)
    advantages = torch.where(sampled, torch.randn(40, generator=generator), 0.0)
    advantages[20:22] = 0.0
    inputs = {"logprobs": q, "advantages": advantages}
    if name == "gspo":
        inputs["sequence_ratio_mask"] = sampled.float()
    return lp, inputs


def settings_of(name: str) -> dict[str, float]:
    return {"beta": 0.1} if name == "dro" else {}
