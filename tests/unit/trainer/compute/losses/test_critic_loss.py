"""ppo_critic: the clipped squared error of a value head, and its metrics."""

import math

import pytest
import torch

from services.trainer.compute.losses import combine_metrics
from tests.unit.trainer.compute.losses.policy_batches import compute, loss_and_gradient

VALUES = torch.tensor([0.5, 2.0, -1.0, 3.0, 0.0])
OLD = torch.tensor([0.4, 0.5, -0.5, 1.0, 0.0])
RETURNS = torch.tensor([1.0, 0.0, -3.0, 4.0, 100.0])
VALUE_WEIGHTS = torch.tensor([1.0, 0.5, 2.0, 1.0, 0.0])


@pytest.mark.parametrize("clip", [0.0, 0.2, 10.0])
def test_ppo_critic_is_half_the_larger_of_the_two_squared_errors(clip: float) -> None:
    loss, gradient = loss_and_gradient(
        "ppo_critic", VALUES, {"value_clip": clip}, values=OLD, returns=RETURNS, weights=VALUE_WEIGHTS
    )
    expected, slopes = 0.0, []
    for v, old, target, weight in zip(
        *(t.tolist() for t in (VALUES, OLD, RETURNS, VALUE_WEIGHTS)), strict=True
    ):
        bounded = min(max(v, old - clip), old + clip) if clip else v
        expected += weight * 0.5 * max((v - target) ** 2, (bounded - target) ** 2)
        slopes.append(0.0 if (bounded - target) ** 2 > (v - target) ** 2 else weight * (v - target))
    assert loss == pytest.approx(expected)
    assert gradient.tolist() == pytest.approx(slopes)


def test_ppo_critic_without_weights_counts_every_position() -> None:
    loss, gradient = loss_and_gradient("ppo_critic", VALUES, values=OLD, returns=RETURNS)
    assert loss == pytest.approx(float((0.5 * (VALUES - RETURNS) ** 2).sum()))
    assert gradient.tolist() == pytest.approx((VALUES - RETURNS).tolist())


def test_garbage_where_a_critics_weight_is_zero_changes_nothing() -> None:
    garbage = torch.tensor([1.0, math.nan, math.inf])
    inputs = {"values": torch.zeros(3), "returns": torch.zeros(3), "weights": torch.tensor([1.0, 0.0, 0.0])}
    loss, gradient = loss_and_gradient("ppo_critic", garbage, {"value_clip": 0.5}, **inputs)
    assert loss == 0.5
    assert gradient.tolist() == [1.0, 0.0, 0.0]


def test_ppo_critic_metrics_are_of_the_positions_that_count() -> None:
    inputs = {"values": OLD, "returns": RETURNS, "weights": VALUE_WEIGHTS}
    _, parts = compute("ppo_critic", VALUES, inputs, {"value_clip": 0.2})
    row = {"loss:sum": 0.0, **{name: float(part) for name, part in parts.items()}}
    metrics = combine_metrics("ppo_critic", [row, row])
    values, returns = VALUES[:4].double(), RETURNS[:4].double()
    assert metrics["value_tokens:sum"] == 8
    assert metrics["value:mean"] == pytest.approx(float(values.mean()))
    assert metrics["return:mean"] == pytest.approx(float(returns.mean()))
    assert metrics["value_error:mean"] == pytest.approx(float((values - returns).square().mean()))
    # Positions 2 and 3 are nearer to R than their bound is; 0 is within it, and 1 is beyond it away from R.
    assert metrics["clipped_fraction:mean"] == pytest.approx(2 / 4)
    explained = 1 - (returns - values).var(correction=0) / returns.var(correction=0)
    assert metrics["explained_variance:mean"] == pytest.approx(float(explained))


def test_a_critics_request_without_positions_that_count_has_no_means() -> None:
    zero = torch.zeros(2)
    _, parts = compute("ppo_critic", torch.ones(2), {"values": zero, "returns": zero, "weights": zero})
    row = {"loss:sum": 0.0, **{name: float(part) for name, part in parts.items()}}
    assert not any(name.endswith(":mean") for name in combine_metrics("ppo_critic", [row]))
