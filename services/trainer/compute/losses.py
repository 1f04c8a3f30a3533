"""Loss functions over target log-probabilities, or a critic's values, of one datum.

Every loss is a token SUM. Invariant: a position whose weight or advantage is zero contributes exactly
zero to the loss and to every gradient, whatever stands there, so masked positions may hold garbage.
(gspo's sequence ratio is the one thing that such a position can enter: it has a mask of its own.)

In formulas lp is `logprobs`, v a critic's value, q and A are the inputs "logprobs" and "advantages",
r = exp(lp - q), sg stops the gradient, and lo and hi are the clip thresholds, absolute bounds of a ratio.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.common.contract.loss_schema import (
    CLIP_HIGH,
    CLIP_LOW,
    SEQUENCE_RATIO_MASK,
    VALUE_CLIP,
    settings,
)

LOSS_SUM = "loss:sum"

RowMetrics = dict[str, Tensor]
LossFunction = Callable[[Tensor, Mapping[str, Tensor], Mapping[str, float]], tuple[Tensor, RowMetrics]]


@dataclass(frozen=True)
class Loss:
    """A loss function.

    Attributes:
        name: its key in `LOSSES` and `common.loss_schema.LOSS_SCHEMAS`.
        function: like `compute`, but takes all settings.
        combine: joins the parts of all rows of an operation, in row order, into metrics
            named "name:reduction".
        output: what it is a function of, as results name it.
    """

    name: str
    function: LossFunction
    combine: Callable[[Sequence[Mapping[str, float]]], dict[str, float]]
    output: str = "logprobs"

    def compute(
        self, outputs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]
    ) -> tuple[Tensor, RowMetrics]:
        """The loss of one datum.

        Args:
            outputs: log-probabilities, float32 [N] or [N, K]; or values, float32 [N].
            inputs: those of `common.loss_schema`, on the same device.
            config: the request's settings; what it lacks has its default.

        Returns:
            The scalar loss, and this datum's parts of the metrics as 0-d tensors.
        """
        return self.function(outputs, inputs, settings(self.name, config))


def cross_entropy(
    logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]
) -> tuple[Tensor, RowMetrics]:
    """-sum(weights * lp). Weights may be fractional or negative; [N, K] has K targets a position."""
    weights = inputs["weights"]
    return -_masked(weights, weights * logprobs).sum(), {}


def importance_sampling(
    logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]
) -> tuple[Tensor, RowMetrics]:
    """-sum(r * A)."""
    log_ratio = _log_ratio(logprobs, inputs)
    loss = -(log_ratio.exp() * inputs["advantages"]).sum()
    return loss, _policy_metrics(logprobs, inputs)


def ppo(
    logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]
) -> tuple[Tensor, RowMetrics]:
    """-sum(min(r * A, clamp(r, lo, hi) * A))."""
    loss, clipped = _clipped_surrogate(_log_ratio(logprobs, inputs), inputs, config)
    return loss, {**_policy_metrics(logprobs, inputs), "clipped_tokens": clipped.sum()}


def cispo(
    logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]
) -> tuple[Tensor, RowMetrics]:
    """-sum(sg(clamp(r, lo, hi)) * lp * A): a clipped token keeps its gradient, with a bounded weight."""
    advantages = inputs["advantages"]
    ratio = _log_ratio(logprobs.detach(), inputs).exp()
    low, high = _clip_range(ratio, inputs, config)
    loss = -(ratio.clamp(low, high) * _masked(advantages, logprobs) * advantages).sum()
    clipped = ((ratio < low) | (ratio > high)) & (advantages != 0)
    return loss, {**_policy_metrics(logprobs, inputs), "clipped_tokens": clipped.sum()}


def dro(
    logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]
) -> tuple[Tensor, RowMetrics]:
    """-sum(lp * A - beta / 2 * (lp - q)^2), over the sampled positions: a sampled token whose advantage is
    zero keeps its penalty."""
    advantages = inputs["advantages"]
    penalty = 0.5 * config["beta"] * _masked(_sampled(inputs), logprobs - inputs["logprobs"]).square()
    loss = -(_masked(advantages, logprobs) * advantages - penalty).sum()
    return loss, _policy_metrics(logprobs, inputs)


def gspo(
    logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]
) -> tuple[Tensor, RowMetrics]:
    """-sum(min(r * A, clamp(r, lo, hi) * A)) with r = s * exp(lp - sg(lp)).

    s = exp(mean of sg(lp) - q where the mask is not 0) is the datum's sequence ratio: all tokens share its
    value, and each has the gradient of its own log-probability. Without a mask these are the sampled tokens.
    """
    mask = inputs[SEQUENCE_RATIO_MASK] if SEQUENCE_RATIO_MASK in inputs else _sampled(inputs)
    fixed = logprobs.detach()
    # Without a masked position there is no advantage either (`loss_schema`), and any ratio will do.
    sequence = _masked(mask, fixed - inputs["logprobs"]).sum() / (mask != 0).sum().clamp(min=1)
    log_ratio = _masked(inputs["advantages"], sequence + (logprobs - fixed))
    loss, clipped = _clipped_surrogate(log_ratio, inputs, config)
    metrics = _policy_metrics(logprobs, inputs)
    return loss, {
        **metrics,
        "importance_ratio": _masked(metrics["sampled_tokens"], metrics["sampled_tokens"] * sequence.exp()),
        "clipped_tokens": clipped.sum(),
    }


def ppo_critic(
    values: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]
) -> tuple[Tensor, RowMetrics]:
    """sum(w / 2 * max((v - R)^2, (clamp(v, v_old - c, v_old + c) - R)^2)), the clipped value loss of PPO.

    R and v_old are the inputs "returns" and "values", w is the input "weights" or 1, c the setting
    value_clip: with 0 nothing is clipped, and the loss is sum(w / 2 * (v - R)^2).
    """
    returns, old, clip = inputs["returns"], inputs["values"], config[VALUE_CLIP]
    weights = inputs["weights"] if "weights" in inputs else torch.ones_like(values)
    error = _masked(weights, values - returns).square()
    fixed = values.detach()
    bounded = fixed.clamp(old - clip, old + clip) if clip else fixed
    bounded_error = _masked(weights, bounded - returns).square()
    # Clipping only ever makes the loss larger; a clipped value has no gradient.
    clipped = bounded_error > error.detach()
    loss = 0.5 * (weights * torch.where(clipped, bounded_error, error)).sum()
    counted = weights != 0
    return loss, {
        "value_tokens": counted.sum(),
        "value": _masked(counted, fixed).sum(),
        "return": _masked(counted, returns).sum(),
        "return_squared": _masked(counted, returns).square().sum(),
        "value_error": error.detach().sum(),
        "clipped_values": clipped.sum(),
    }


def _sampled(inputs: Mapping[str, Tensor]) -> Tensor:
    """bool [N]. By the SDK's convention a position that was not sampled has logprob 0 and advantage 0."""
    return (inputs["advantages"] != 0) | (inputs["logprobs"] != 0)


def _masked(selector: Tensor, values: Tensor) -> Tensor:
    """`values` where the selector is not zero, else zero with a zero gradient."""
    return torch.where(selector != 0, values, torch.zeros_like(values))


def _log_ratio(logprobs: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """log r where there is an advantage, else 0."""
    return _masked(inputs["advantages"], logprobs - inputs["logprobs"])


def _clip_range(
    like: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]
) -> tuple[Tensor, Tensor]:
    """The lower and the upper threshold of every position: the datum's own, else the setting."""
    low, high = (
        inputs[key] if key in inputs else torch.full_like(like, config[key]) for key in (CLIP_LOW, CLIP_HIGH)
    )
    return low, high


def _clipped_surrogate(
    log_ratio: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]
) -> tuple[Tensor, Tensor]:
    """-sum(min(ratio * A, clamp(ratio, lo, hi) * A)), and where the clamped term is the smaller one."""
    advantages = inputs["advantages"]
    ratio = log_ratio.detach().exp()
    bound = ratio.clamp(*_clip_range(ratio, inputs, config))
    clipped = bound * advantages < ratio * advantages
    # A clipped token has no gradient. Its ratio, which may have overflowed, stays out of the graph, where
    # zero times its infinite derivative would be NaN.
    unclipped = torch.where(clipped, torch.zeros_like(log_ratio), log_ratio).exp()
    return -(torch.where(clipped, bound, unclipped) * advantages).sum(), clipped


def _policy_metrics(logprobs: Tensor, inputs: Mapping[str, Tensor]) -> RowMetrics:
    """Sums over the sampled tokens, of r and of the k1 and k2 estimates of KL(sampler || learner)."""
    sampled = _sampled(inputs)
    log_ratio = _masked(sampled, logprobs.detach() - inputs["logprobs"])
    return {
        "sampled_tokens": sampled.sum(),
        "importance_ratio": _masked(sampled, log_ratio.exp()).sum(),
        "kl_k1": -log_ratio.sum(),
        "kl_k2": 0.5 * log_ratio.square().sum(),
    }


_MEANS = {
    "importance_ratio": "importance_ratio:mean",
    "kl_k1": "kl_k1:mean",
    "kl_k2": "kl_k2:mean",
    "clipped_tokens": "clipped_fraction:mean",
}


def _combine_loss(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {LOSS_SUM: _total(parts, LOSS_SUM)}


def _combine_policy(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Adds sums, which stay exact when the SDK joins its chunks, and means over the sampled tokens."""
    names = [name for name in parts[0] if name != LOSS_SUM]
    totals = {name: _total(parts, name) for name in names}
    metrics = _combine_loss(parts) | {f"{name}:sum": total for name, total in totals.items()}
    tokens = totals["sampled_tokens"]
    if tokens:
        metrics |= {_MEANS[name]: total / tokens for name, total in totals.items() if name in _MEANS}
    return metrics


def _combine_critic(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Adds sums, means over the positions that count, and how much of the returns' variance is explained."""
    totals = {name: _total(parts, name) for name in parts[0] if name != LOSS_SUM}
    metrics = _combine_loss(parts) | {f"{name}:sum": total for name, total in totals.items()}
    positions = totals["value_tokens"]
    if not positions:
        return metrics
    mean = {name: total / positions for name, total in totals.items()}
    metrics |= {f"{name}:mean": mean[name] for name in ("value", "return", "value_error")}
    metrics["clipped_fraction:mean"] = mean["clipped_values"]
    variance = mean["return_squared"] - mean["return"] ** 2
    unexplained = mean["value_error"] - (mean["value"] - mean["return"]) ** 2
    # Below float32's resolution of the returns there is no variance to speak of.
    if variance > 1e-6 * mean["return_squared"]:
        metrics["explained_variance:mean"] = 1 - unexplained / variance
    return metrics


def _total(parts: Sequence[Mapping[str, float]], key: str) -> float:
    values = [part[key] for part in parts]
    return math.fsum(values) if all(map(math.isfinite, values)) else float(sum(values))


LOSSES: dict[str, Loss] = {
    loss.name: loss
    for loss in (
        Loss("cross_entropy", cross_entropy, _combine_loss),
        Loss("importance_sampling", importance_sampling, _combine_policy),
        Loss("ppo", ppo, _combine_policy),
        Loss("cispo", cispo, _combine_policy),
        Loss("dro", dro, _combine_policy),
        Loss("gspo", gspo, _combine_policy),
        Loss("ppo_critic", ppo_critic, _combine_critic, output="values"),
    )
}


def combine_metrics(loss_fn: str, partials: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of an operation from the `RowResult.metrics` of its rows, given in request order."""
    return LOSSES[loss_fn].combine(partials)
