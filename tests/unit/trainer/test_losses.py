"""The losses are the token sums of the Tinker contract, and masked positions are inert."""

import math

import pytest
import torch

from services.common.loss_schema import LOSS_SCHEMAS
from services.trainer.losses import LOSSES, combine_metrics

LOGPROBS = torch.tensor([-1.0, -2.5, -0.25, -4.0])


def loss_and_gradient(name: str, lp: torch.Tensor, /, **inputs: torch.Tensor) -> tuple[float, torch.Tensor]:
    leaf = lp.clone().requires_grad_()
    loss, _ = LOSSES[name].compute(leaf, inputs, {})
    (gradient,) = torch.autograd.grad(loss, leaf)
    return float(loss.detach()), gradient


def test_every_described_loss_is_implemented_and_the_other_way_round() -> None:
    assert LOSSES.keys() == LOSS_SCHEMAS.keys()


def test_cross_entropy_is_the_weighted_sum_with_fractional_and_negative_weights() -> None:
    weights = torch.tensor([0.5, -1.0, 0.0, 2.0])
    loss, gradient = loss_and_gradient("cross_entropy", LOGPROBS, weights=weights)
    assert loss == pytest.approx(0.5 * 1.0 - 2.5 + 2.0 * 4.0)
    assert torch.equal(gradient, -weights)


def test_cross_entropy_sums_over_several_targets_per_position() -> None:
    weights = torch.tensor([[0.5, 0.25], [1.0, 0.0]])
    loss, _ = loss_and_gradient("cross_entropy", LOGPROBS.view(2, 2), weights=weights)
    assert loss == pytest.approx(0.5 * 1.0 + 0.25 * 2.5 + 0.25)


def test_importance_sampling_is_the_ratio_times_the_advantage() -> None:
    q = torch.tensor([-1.5, -2.0, -0.25, -3.0])
    advantages = torch.tensor([1.0, -2.0, 0.5, 0.0])
    loss, gradient = loss_and_gradient("importance_sampling", LOGPROBS, logprobs=q, advantages=advantages)
    ratios = [math.exp(0.5), math.exp(-0.5), 1.0, math.exp(-1.0)]
    terms = [-ratio * advantage for ratio, advantage in zip(ratios, advantages.tolist(), strict=True)]
    assert loss == pytest.approx(sum(terms))
    assert gradient.tolist() == pytest.approx(terms)


def test_garbage_where_the_weight_is_zero_changes_neither_loss_nor_gradient() -> None:
    logprobs = torch.tensor([-1.0, -math.inf, math.nan])
    loss, gradient = loss_and_gradient("cross_entropy", logprobs, weights=torch.tensor([2.0, 0.0, 0.0]))
    assert loss == 2.0
    assert gradient.tolist() == [-2.0, 0.0, 0.0]


def test_garbage_where_the_advantage_is_zero_changes_neither_loss_nor_gradient() -> None:
    logprobs = torch.tensor([-1.0, -1.0, -math.inf, math.nan])
    q = torch.tensor([-1.0, -1e30, 0.0, 0.0])
    advantages = torch.tensor([3.0, 0.0, 0.0, 0.0])
    loss, gradient = loss_and_gradient("importance_sampling", logprobs, logprobs=q, advantages=advantages)
    assert loss == -3.0
    assert gradient.tolist() == [-3.0, 0.0, 0.0, 0.0]


def test_metrics_are_token_means_over_the_request_however_the_rows_are_cut() -> None:
    q = torch.tensor([-1.5, -2.0, -0.25, -3.0])
    advantages = torch.tensor([1.0, -2.0, 0.5, 1.0])

    def parts(*cuts: slice) -> list[dict[str, float]]:
        rows = []
        for cut in cuts:
            inputs = {"logprobs": q[cut], "advantages": advantages[cut]}
            loss, metrics = LOSSES["importance_sampling"].compute(LOGPROBS[cut], inputs, {})
            rows.append({"loss:sum": float(loss), **{name: float(value) for name, value in metrics.items()}})
        return rows

    whole = combine_metrics("importance_sampling", parts(slice(0, 4)))
    cut = combine_metrics("importance_sampling", parts(slice(0, 1), slice(1, 4)))
    assert cut == pytest.approx(whole)
    assert whole["kl_k1:mean"] == pytest.approx(float((q - LOGPROBS).mean()))
    assert whole["importance_ratio:mean"] == pytest.approx(float((LOGPROBS - q).exp().mean()))
    assert all(name.count(":") == 1 for name in whole)


def test_positions_that_were_not_sampled_do_not_count_in_the_metrics() -> None:
    inputs = {"logprobs": torch.tensor([0.0, -1.0]), "advantages": torch.tensor([0.0, 0.0])}
    _, metrics = LOSSES["importance_sampling"].compute(torch.tensor([-30.0, -1.0]), inputs, {})
    assert {name: float(value) for name, value in metrics.items()} == {"tokens": 1, "ratio": 1, "kl": 0}


def test_a_loss_that_is_not_finite_is_reported_as_such() -> None:
    parts = [{"loss:sum": 1.0}, {"loss:sum": math.inf}, {"loss:sum": -math.inf}]
    assert math.isnan(combine_metrics("cross_entropy", parts)["loss:sum"])
