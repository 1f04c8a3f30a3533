"""Loss functions over target log-probabilities, or a critic's values, of many datums at once.

Every loss is a token SUM. Invariant: a position whose weight or advantage is zero contributes exactly
zero to the loss and to every gradient, whatever stands there, so masked positions may hold garbage.
(gspo's sequence ratio is the one thing that such a position can enter: it has a mask of its own.)
Nothing of one datum enters another's loss, not even what is not finite.

In formulas lp is `logprobs`, v a critic's value, q and A are the inputs "logprobs" and "advantages",
r = exp(lp - q), sg stops the gradient, and lo and hi are the clip thresholds, absolute bounds of a ratio.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from services.common.contract.loss_schema import (
    CLIP_HIGH,
    CLIP_LOW,
    SEQUENCE_RATIO_MASK,
    TARGETS,
    VALUE_CLIP,
    settings,
)
from services.trainer.compute.memory.transfer import on_device

LOSS_SUM = "loss:sum"


@dataclass(frozen=True)
class Datums:
    """How Q outputs are shared by D datums, one after the other.

    Attributes:
        outputs: Q.
        counts: int64 [D], at least 1 each.
        offsets: int64 [D + 1], where each begins, and the end.
    """

    outputs: int
    counts: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, counts: Sequence[int], device: str) -> Datums:
        """Datums of these many outputs."""
        made = torch.tensor(counts)
        offsets = torch.nn.functional.pad(made.cumsum(0), (1, 0))
        return cls(sum(counts), on_device(made, device), on_device(offsets, device))

    def sum(self, values: Tensor) -> Tensor:
        """Each datum's sum of `values` [Q], in float64 [D]."""
        # Counts are known to fit; checking them would wait for the device.
        return torch.segment_reduce(values.double(), "sum", offsets=self.offsets, unsafe=True)

    def spread(self, each: Tensor) -> Tensor:
        """[Q], at every output of a datum that datum's number of `each` [D]."""
        return each.repeat_interleave(self.counts, output_size=self.outputs)


Inputs = Mapping[str, Tensor]
Parts = dict[str, Tensor]
"""Of a metric, each datum's part: float64 [D]."""
LossFunction = Callable[[Tensor, Inputs, Datums], tuple[Tensor, Parts]]


@dataclass(frozen=True)
class Loss:
    """A loss function.

    Attributes:
        name: its key in `LOSSES` and `contract.loss_schema.LOSS_SCHEMAS`.
        compute: of outputs, log-probabilities or values, float32 [Q], what `complete` made of each datum, one
            after the other, [Q] on the same device, and the datums: their losses, float64 [D], and their
            parts of the metrics.
        combine: joins the parts of all rows of an operation, in row order, into metrics
            named "name:reduction".
        output: what it is a function of, as results name it.
        absent: makes an optional input of a datum from its others.
        by_output: each output's term, and so its derivative, depends on that output alone.
    """

    name: str
    compute: LossFunction
    combine: Callable[[Sequence[Mapping[str, float]]], dict[str, float]]
    output: str = "logprobs"
    absent: Mapping[str, Callable[[Mapping[str, np.ndarray]], np.ndarray]] = field(default_factory=dict)
    by_output: bool = True

    def complete(
        self, inputs: Mapping[str, np.ndarray], config: Mapping[str, float]
    ) -> dict[str, np.ndarray]:
        """All that the function takes of one datum, float32 and flat.

        Args:
            inputs: those of `contract.loss_schema`; the target ids are left out.
            config: the request's settings, which hold at every output; what it lacks has its default.
        """
        made = {name: values.ravel() for name, values in inputs.items() if name != TARGETS}
        size = next(iter(made.values())).size
        for name, value in settings(self.name, config).items():
            made.setdefault(name, np.full(size, value, np.float32))
        for name, make in self.absent.items():
            if name not in made:
                made[name] = make(made)
        return made


def cross_entropy(logprobs: Tensor, inputs: Inputs, datums: Datums) -> tuple[Tensor, Parts]:
    """-sum(weights * lp). Weights may be fractional or negative; [N, K] has K targets a position."""
    weights = inputs["weights"]
    return -datums.sum(_masked(weights, weights * logprobs)), {}


def importance_sampling(logprobs: Tensor, inputs: Inputs, datums: Datums) -> tuple[Tensor, Parts]:
    """-sum(r * A)."""
    loss = -datums.sum(_log_ratio(logprobs, inputs).exp() * inputs["advantages"])
    return loss, _policy_metrics(logprobs, inputs, datums)


def ppo(logprobs: Tensor, inputs: Inputs, datums: Datums) -> tuple[Tensor, Parts]:
    """-sum(min(r * A, clamp(r, lo, hi) * A))."""
    terms, clipped = _clipped_surrogate(_log_ratio(logprobs, inputs), inputs)
    parts = {**_policy_metrics(logprobs, inputs, datums), "clipped_tokens": datums.sum(clipped)}
    return -datums.sum(terms), parts


def cispo(logprobs: Tensor, inputs: Inputs, datums: Datums) -> tuple[Tensor, Parts]:
    """-sum(sg(clamp(r, lo, hi)) * lp * A): a clipped token keeps its gradient, with a bounded weight."""
    advantages, low, high = inputs["advantages"], inputs[CLIP_LOW], inputs[CLIP_HIGH]
    ratio = _log_ratio(logprobs.detach(), inputs).exp()
    loss = -datums.sum(ratio.clamp(low, high) * _masked(advantages, logprobs) * advantages)
    clipped = ((ratio < low) | (ratio > high)) & (advantages != 0)
    return loss, {**_policy_metrics(logprobs, inputs, datums), "clipped_tokens": datums.sum(clipped)}


def dro(logprobs: Tensor, inputs: Inputs, datums: Datums) -> tuple[Tensor, Parts]:
    """-sum(lp * A - beta / 2 * (lp - q)^2), over the sampled positions: a sampled token whose advantage is
    zero keeps its penalty."""
    advantages = inputs["advantages"]
    penalty = 0.5 * inputs["beta"] * _masked(_sampled(inputs), logprobs - inputs["logprobs"]).square()
    loss = -datums.sum(_masked(advantages, logprobs) * advantages - penalty)
    return loss, _policy_metrics(logprobs, inputs, datums)


def gspo(logprobs: Tensor, inputs: Inputs, datums: Datums) -> tuple[Tensor, Parts]:
    """-sum(min(r * A, clamp(r, lo, hi) * A)) with r = s * exp(lp - sg(lp)).

    s = exp(mean of sg(lp) - q where the mask is not 0) is the datum's sequence ratio: all tokens share its
    value, and each has the gradient of its own log-probability. Without a mask these are the sampled tokens.
    """
    mask = inputs[SEQUENCE_RATIO_MASK]
    fixed = logprobs.detach()
    # Without a masked position there is no advantage either (`loss_schema`), and any ratio will do.
    marked = datums.sum(mask != 0).clamp(min=1)
    sequence = datums.sum(_masked(mask, fixed - inputs["logprobs"])) / marked
    own = datums.spread(sequence.float()) + (logprobs - fixed)
    terms, clipped = _clipped_surrogate(_masked(inputs["advantages"], own), inputs)
    metrics = _policy_metrics(logprobs, inputs, datums)
    tokens = metrics["sampled_tokens"]
    return -datums.sum(terms), {
        **metrics,
        "importance_ratio": _masked(tokens, tokens * sequence.exp()),
        "clipped_tokens": datums.sum(clipped),
    }


def ppo_critic(values: Tensor, inputs: Inputs, datums: Datums) -> tuple[Tensor, Parts]:
    """sum(w / 2 * max((v - R)^2, (clamp(v, v_old - c, v_old + c) - R)^2)), the clipped value loss of PPO.

    R and v_old are the inputs "returns" and "values", w is the input "weights" or 1, c the setting
    value_clip: with 0 nothing is clipped, and the loss is sum(w / 2 * (v - R)^2).
    """
    returns, old, clip = inputs["returns"], inputs["values"], inputs[VALUE_CLIP]
    weights = inputs["weights"]
    error = _masked(weights, values - returns).square()
    fixed = values.detach()
    bounded = torch.where(clip != 0, fixed.clamp(old - clip, old + clip), fixed)
    bounded_error = _masked(weights, bounded - returns).square()
    # Clipping only ever makes the loss larger; a clipped value has no gradient.
    clipped = bounded_error > error.detach()
    loss = 0.5 * datums.sum(weights * torch.where(clipped, bounded_error, error))
    counted = weights != 0
    return loss, {
        "value_tokens": datums.sum(counted),
        "value": datums.sum(_masked(counted, fixed)),
        "return": datums.sum(_masked(counted, returns)),
        "return_squared": datums.sum(_masked(counted, returns).square()),
        "value_error": datums.sum(error.detach()),
        "clipped_values": datums.sum(clipped),
    }


def _sampled(inputs: Inputs) -> Tensor:
    """bool [Q]. By the SDK's convention a position that was not sampled has logprob 0 and advantage 0."""
    return (inputs["advantages"] != 0) | (inputs["logprobs"] != 0)


def _masked(selector: Tensor, values: Tensor) -> Tensor:
    """`values` where the selector is not zero, else zero with a zero gradient."""
    return torch.where(selector != 0, values, torch.zeros_like(values))


def _log_ratio(logprobs: Tensor, inputs: Inputs) -> Tensor:
    """log r where there is an advantage, else 0."""
    return _masked(inputs["advantages"], logprobs - inputs["logprobs"])


def _clipped_surrogate(log_ratio: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """min(ratio * A, clamp(ratio, lo, hi) * A), and where the clamped term is the smaller one."""
    advantages = inputs["advantages"]
    ratio = log_ratio.detach().exp()
    bound = ratio.clamp(inputs[CLIP_LOW], inputs[CLIP_HIGH])
    clipped = bound * advantages < ratio * advantages
    # A clipped token has no gradient. Its ratio, which may have overflowed, stays out of the graph, where
    # zero times its infinite derivative would be NaN.
    unclipped = torch.where(clipped, torch.zeros_like(log_ratio), log_ratio).exp()
    return torch.where(clipped, bound, unclipped) * advantages, clipped


def _policy_metrics(logprobs: Tensor, inputs: Inputs, datums: Datums) -> Parts:
    """Sums over the sampled tokens, of r and of the k1 and k2 estimates of KL(sampler || learner)."""
    sampled = _sampled(inputs)
    log_ratio = _masked(sampled, logprobs.detach() - inputs["logprobs"])
    return {
        "sampled_tokens": datums.sum(sampled),
        "importance_ratio": datums.sum(_masked(sampled, log_ratio.exp())),
        "kl_k1": -datums.sum(log_ratio),
        "kl_k2": 0.5 * datums.sum(log_ratio.square()),
    }


def _sampled_mask(inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """gspo's mask of a datum that has none: the sampled positions."""
    return ((inputs["advantages"] != 0) | (inputs["logprobs"] != 0)).astype(np.float32)


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
        Loss("gspo", gspo, _combine_policy, absent={SEQUENCE_RATIO_MASK: _sampled_mask}, by_output=False),
        Loss(
            "ppo_critic",
            ppo_critic,
            _combine_critic,
            output="values",
            absent={"weights": lambda inputs: np.ones_like(inputs["returns"])},
        ),
    )
}


def combine_metrics(loss_fn: str, partials: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of an operation from the `RowResult.metrics` of its rows, given in request order."""
    return LOSSES[loss_fn].combine(partials)
