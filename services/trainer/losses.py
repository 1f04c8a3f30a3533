"""Loss functions over target log-probabilities of one datum.

Every loss is a token SUM. Invariant: a position whose weight or advantage is zero contributes exactly
zero to the loss and to every gradient, whatever stands there, so masked positions may hold garbage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LOSS_SUM = "loss:sum"

RowMetrics = dict[str, Tensor]
LossFunction = Callable[[Tensor, Mapping[str, Tensor], Mapping[str, float]], tuple[Tensor, RowMetrics]]


@dataclass(frozen=True)
class Loss:
    """A loss function.

    Attributes:
        compute: (logprobs float32 [N] or [N, K], inputs of `common.loss_schema` on the same device, settings)
            -> (scalar loss, parts of the metrics as 0-d tensors).
        combine: joins the parts of all rows of an operation, in row order, into metrics
            named "name:reduction".
    """

    compute: LossFunction
    combine: Callable[[Sequence[Mapping[str, float]]], dict[str, float]]


def cross_entropy(
    logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]
) -> tuple[Tensor, RowMetrics]:
    """-sum(weights * logprobs). Weights may be fractional or negative; [N, K] has K targets a position."""
    weights = inputs["weights"]
    return -_masked(weights, weights * logprobs).sum(), {}


def importance_sampling(
    logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]
) -> tuple[Tensor, RowMetrics]:
    """-sum(exp(logprobs - q) * advantages), q = inputs["logprobs"]."""
    advantages = inputs["advantages"]
    log_ratio = _masked(advantages, logprobs - inputs["logprobs"])
    loss = -_masked(advantages, log_ratio.exp() * advantages).sum()
    return loss, _ratio_metrics(logprobs.detach(), inputs)


def _masked(selector: Tensor, values: Tensor) -> Tensor:
    """`values` where the selector is not zero, else zero with a zero gradient."""
    return torch.where(selector != 0, values, torch.zeros_like(values))


def _ratio_metrics(logprobs: Tensor, inputs: Mapping[str, Tensor]) -> RowMetrics:
    # By the SDK's convention a position that was not sampled has logprob 0 and advantage 0.
    sampled = (inputs["advantages"] != 0) | (inputs["logprobs"] != 0)
    log_ratio = torch.where(sampled, logprobs - inputs["logprobs"], torch.zeros_like(logprobs))
    ratio = torch.where(sampled, log_ratio.exp(), torch.zeros_like(logprobs))
    return {"tokens": sampled.sum(), "ratio": ratio.sum(), "kl": -log_ratio.sum()}


def _combine_sums(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {LOSS_SUM: _total(parts, LOSS_SUM)}


def _combine_policy(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Adds the sampled tokens' mean importance ratio and their mean k1 estimate of KL(sampler || learner)."""
    tokens = _total(parts, "tokens")
    metrics = _combine_sums(parts)
    if tokens:
        metrics["importance_ratio:mean"] = _total(parts, "ratio") / tokens
        metrics["kl_k1:mean"] = _total(parts, "kl") / tokens
    return metrics


def _total(parts: Sequence[Mapping[str, float]], key: str) -> float:
    values = [part[key] for part in parts]
    return math.fsum(values) if all(map(math.isfinite, values)) else float(sum(values))


LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(cross_entropy, _combine_sums),
    "importance_sampling": Loss(importance_sampling, _combine_policy),
}


def combine_metrics(loss_fn: str, partials: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of an operation from the `RowResult.metrics` of its rows, given in request order."""
    return LOSSES[loss_fn].combine(partials)
