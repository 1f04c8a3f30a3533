"""A second, independent implementation of LoRA training: plain transformers, one datum at a time, float32.

Shares nothing with the trainer but plain data (names and values of the initial adapter, the rows).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from services.common.contract.tensors import HostTensor
from services.trainer.compute.data import AdamSpec, Row


class AdaptedLinear(nn.Module):
    """A frozen linear plus a low-rank update."""

    def __init__(self, inner: nn.Linear, a: nn.Parameter, b: nn.Parameter) -> None:
        super().__init__()
        self.inner, self.a, self.b = inner, a, b
        self.scale = 32.0 / a.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + (x @ self.a.T) @ self.b.T * self.scale


class ReferenceModel:
    """A base model with one adapter, or with all its weights in training, by the textbook loop."""

    def __init__(
        self, directory: Path, adapter: Mapping[str, HostTensor] | None = None, train_all: bool = False
    ) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.model.requires_grad_(False)
        self.parameters = {
            name: nn.Parameter(torch.from_numpy(values(array).copy()))
            for name, array in (adapter or {}).items()
        }
        for name in sorted({name.rpartition(".")[0] for name in self.parameters} - {"value_head"}):
            parent, _, leaf = name.rpartition(".")
            adapted = AdaptedLinear(
                self.model.get_submodule(name),
                self.parameters[f"{name}.lora_A"],
                self.parameters[f"{name}.lora_B"],
            )
            setattr(self.model.get_submodule(parent), leaf, adapted)
        if train_all:
            self.model.requires_grad_(True)
            self.parameters = dict(self.model.named_parameters())
        self.optimizer = torch.optim.AdamW(self.parameters.values()) if self.parameters else None

    def logprobs(self, row: Row) -> Tensor:
        """float32, in the shape of the row's targets."""
        tokens = torch.from_numpy(np.frombuffer(row.tokens, "<i4").astype(np.int64))
        targets = torch.from_numpy(values(row.loss_inputs["target_tokens"]).copy())
        distribution = self.model(tokens[None]).logits[0].log_softmax(-1)
        columns = targets if targets.dim() == 2 else targets[:, None]
        return distribution.gather(1, columns).view(targets.shape)

    def values(self, row: Row) -> Tensor:
        """float32 [N], of a critic."""
        tokens = torch.from_numpy(np.frombuffer(row.tokens, "<i4").astype(np.int64))
        hidden = self.model.base_model(tokens[None]).last_hidden_state[0]
        return (hidden * self.parameters["value_head.weight"]).sum(-1)

    def loss(self, row: Row, loss_fn: str, clip: float = 0.0) -> Tensor:
        inputs = {name: torch.from_numpy(values(array).copy()) for name, array in row.loss_inputs.items()}
        if loss_fn == "ppo_critic":
            predicted, old = self.values(row), inputs["values"]
            error = (predicted - inputs["returns"]) ** 2
            if clip:
                clipped = old + (predicted - old).clamp(-clip, clip)
                error = torch.max(error, (clipped - inputs["returns"]) ** 2)
            return (0.5 * inputs.get("weights", torch.ones_like(old)) * error).sum()
        logprobs = self.logprobs(row)
        if loss_fn == "cross_entropy":
            return -(inputs["weights"] * logprobs).sum()
        ratio = torch.exp(logprobs - inputs["logprobs"])
        return -(ratio * inputs["advantages"]).sum()

    def step(self, rows: Sequence[Row], loss_fn: str, adam: AdamSpec, clip: float = 0.0) -> float:
        """One optimizer step on the sum of the rows' losses; returns the gradient's norm."""
        assert self.optimizer is not None
        for row in rows:
            self.loss(row, loss_fn, clip).backward()
        limit = adam.grad_clip_norm or float("inf")
        norm = nn.utils.clip_grad_norm_(self.parameters.values(), limit)
        for group in self.optimizer.param_groups:
            group["lr"], group["betas"] = adam.learning_rate, (adam.beta1, adam.beta2)
            group["eps"], group["weight_decay"] = adam.eps, adam.weight_decay
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)

    def assert_same_adapter(self, adapter: Mapping[str, HostTensor], tolerance: float = 2e-5) -> None:
        assert adapter.keys() == self.parameters.keys()
        for name, array in adapter.items():
            np.testing.assert_allclose(
                values(array), self.parameters[name].detach().numpy(), rtol=1e-4, atol=tolerance, err_msg=name
            )


def assert_same_outputs(found: np.ndarray, expected: Tensor) -> None:
    """Equal but for rounding, of a model after some optimizer steps.

    The kernels of two CPUs round differently, and every step hands that on to the next. A critic's values,
    sums over the hidden width whose terms cancel, are near 4 after two steps; sound float32 computations of
    them were seen 2e-5 apart.
    """
    np.testing.assert_allclose(found, expected.detach().numpy(), rtol=1e-5, atol=5e-5)


def values(array: HostTensor) -> np.ndarray:
    """The elements of a host array."""
    return np.frombuffer(array.data, {"float32": "<f4", "int64": "<i8"}[array.dtype]).reshape(array.shape)
