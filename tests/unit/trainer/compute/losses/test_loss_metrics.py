"""What a policy loss reports beside its sum, and how the reports of rows become those of a request."""

import math

import pytest
import torch

from services.trainer.compute.losses import combine_metrics
from tests.unit.trainer.compute.losses.policy_batches import (
    CLIPPED_LOSSES,
    POLICY_LOSSES,
    compute,
    episode,
    loss_and_gradient,
    settings_of,
)


def metric_parts(name: str, lp: torch.Tensor, inputs: dict[str, torch.Tensor]) -> dict[str, float]:
    loss, parts = compute(name, lp, inputs, settings_of(name))
    return {"loss:sum": float(loss), **{part: float(value) for part, value in parts.items()}}


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_metrics_are_about_the_sampled_tokens_of_all_rows(name: str) -> None:
    rows = [episode(name, seed) for seed in range(3)]
    metrics = combine_metrics(name, [metric_parts(name, lp, inputs) for lp, inputs in rows])
    log_ratios = [(lp - inputs["logprobs"]).double()[10:] for lp, inputs in rows]
    log_ratio = torch.cat(log_ratios)
    ratio = log_ratio.exp()
    if name == "gspo":
        ratio = torch.cat([torch.full_like(row, float(row.mean().exp())) for row in log_ratios])
    expected = {
        "sampled_tokens:sum": 90.0,
        "importance_ratio:sum": float(ratio.sum()),
        "importance_ratio:mean": float(ratio.mean()),
        "kl_k1:sum": float(-log_ratio.sum()),
        "kl_k1:mean": float(-log_ratio.mean()),
        "kl_k2:sum": float(0.5 * log_ratio.square().sum()),
        "kl_k2:mean": float(0.5 * log_ratio.square().mean()),
    }
    if name in CLIPPED_LOSSES:
        advantages = torch.cat([inputs["advantages"][10:] for _, inputs in rows])
        low, high = (0.0, 4.0) if name == "cispo" else (0.8, 1.2)
        above, below = ratio > high, ratio < low
        if name == "cispo":
            clipped = (above | below) & (advantages != 0)
        else:
            clipped = (above & (advantages > 0)) | (below & (advantages < 0))
        expected["clipped_tokens:sum"] = float(clipped.sum())
        expected["clipped_fraction:mean"] = float(clipped.double().mean())
        assert name != "ppo" or 0 < clipped.sum() < 90
    losses = [loss_and_gradient(name, lp, settings_of(name), **inputs)[0] for lp, inputs in rows]
    expected["loss:sum"] = sum(losses)
    assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert all(key.count(":") == 1 for key in metrics)


def test_sums_stay_exact_when_the_sdk_joins_the_chunks_of_a_request() -> None:
    rows = [metric_parts("ppo", *episode("ppo", seed)) for seed in range(3)]
    whole = combine_metrics("ppo", rows)
    chunks = [combine_metrics("ppo", rows[:1]), combine_metrics("ppo", rows[1:])]
    for key, value in whole.items():
        if key.endswith(":sum"):
            assert sum(chunk[key] for chunk in chunks) == pytest.approx(value)


def test_positions_that_were_not_sampled_do_not_count_in_the_metrics() -> None:
    inputs = {"logprobs": torch.tensor([0.0, -1.0]), "advantages": torch.tensor([0.0, 0.0])}
    parts = metric_parts("importance_sampling", torch.tensor([-30.0, -1.0]), inputs)
    assert parts == {
        "loss:sum": 0,
        "sampled_tokens": 1,
        "importance_ratio": 1,
        "kl_k1": 0,
        "kl_k2": 0,
    }


def test_a_token_without_an_advantage_is_never_a_clipped_one() -> None:
    lp, inputs = episode("cispo")
    inputs["advantages"][10:] = 0.0
    for low, high in ((2.0, 3.0), (0.1, 0.2)):
        config = {"clip_low_threshold": low, "clip_high_threshold": high}
        _, parts = compute("cispo", lp, inputs, config)
        assert float(parts["clipped_tokens"]) == 0.0


def test_a_sequence_without_a_ratio_counts_as_on_policy_in_the_metrics() -> None:
    lp, inputs = episode("gspo")
    empty = {**inputs, "advantages": torch.zeros(40), "sequence_ratio_mask": torch.zeros(40)}
    assert metric_parts("gspo", lp, empty)["importance_ratio"] == 30.0


def test_without_a_sampled_token_there_are_no_means() -> None:
    inputs = {"logprobs": torch.zeros(2), "advantages": torch.zeros(2)}
    metrics = combine_metrics("ppo", [metric_parts("ppo", torch.tensor([-30.0, -1.0]), inputs)])
    assert set(metrics.values()) == {0.0}
    assert all(key.endswith(":sum") for key in metrics)


def test_a_loss_that_is_not_finite_is_reported_as_such() -> None:
    parts = [{"loss:sum": 1.0}, {"loss:sum": math.inf}, {"loss:sum": -math.inf}]
    assert math.isnan(combine_metrics("cross_entropy", parts)["loss:sum"])
