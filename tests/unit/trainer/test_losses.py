"""The losses are the token sums of the Tinker contract, and masked positions are inert."""

import math

import pytest
import torch

from services.common.loss_schema import LOSS_SCHEMAS
from services.trainer.losses import LOSSES, combine_metrics

LOGPROBS = torch.tensor([-1.0, -2.5, -0.25, -4.0])


def loss_and_gradient(
    name: str, lp: torch.Tensor, config: dict[str, float] | None = None, /, **inputs: torch.Tensor
) -> tuple[float, torch.Tensor]:
    leaf = lp.clone().requires_grad_()
    loss, _ = LOSSES[name].compute(leaf, inputs, config or {})
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


# Independent of the code under test: float64, only the positions that count, autograd, no masking tricks.
def reference(name: str, lp: torch.Tensor, inputs: dict[str, torch.Tensor], **config: float) -> torch.Tensor:
    counts = inputs["advantages"] != 0
    advantages, q = inputs["advantages"][counts].double(), inputs["logprobs"].double()
    mine = lp[counts]
    ratio = torch.exp(mine - q[counts])
    if name == "importance_sampling":
        return -(ratio * advantages).sum()
    if name == "dro":
        sampled = counts | (inputs["logprobs"] != 0)
        distance = ((lp - q)[sampled] ** 2).sum()
        return config["beta"] / 2 * distance - (mine * advantages).sum()
    low, high = (
        inputs[f"clip_{side}_threshold"][counts].double()
        if f"clip_{side}_threshold" in inputs
        else torch.full_like(ratio, config[f"clip_{side}_threshold"])
        for side in ("low", "high")
    )
    if name == "cispo":
        return -(torch.minimum(torch.maximum(ratio.detach(), low), high) * mine * advantages).sum()
    if name == "gspo":
        in_sequence = inputs["sequence_ratio_mask"] != 0
        sequence = torch.exp((lp.detach() - q)[in_sequence].mean())
        ratio = sequence * torch.exp(mine - mine.detach())
    return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages).sum()


CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
WIDE = {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}
TIGHT = {"clip_low_threshold": 0.97, "clip_high_threshold": 1.01}
POLICY = [
    ("importance_sampling", {}, {}),
    ("ppo", {}, CLIP),
    ("ppo", TIGHT, TIGHT),
    ("ppo", {"clip_high_threshold": 1.5}, {**CLIP, "clip_high_threshold": 1.5}),
    ("cispo", {}, WIDE),
    ("cispo", TIGHT, TIGHT),
    ("dro", {"beta": 0.05}, {"beta": 0.05}),
    ("dro", {"beta": 0.0}, {"beta": 0.0}),
    ("gspo", {}, CLIP),
    ("gspo", TIGHT, TIGHT),
]
POLICY_LOSSES = sorted({name for name, _, _ in POLICY})
CLIPPED_LOSSES = ["ppo", "cispo", "gspo"]


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


def assert_same_as_reference(
    name: str, lp: torch.Tensor, inputs: dict[str, torch.Tensor], given: dict[str, float], **config: float
) -> torch.Tensor:
    loss, gradient = loss_and_gradient(name, lp, given, **inputs)
    leaf = lp.double().requires_grad_()
    expected = reference(name, leaf, inputs, **config)
    (expected_gradient,) = torch.autograd.grad(expected, leaf)
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5, abs=1e-5)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-5, atol=1e-6)
    return gradient


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "given", "config"), POLICY)
def test_policy_losses_equal_their_formulas(
    name: str, given: dict[str, float], config: dict[str, float], seed: int
) -> None:
    lp, inputs = episode(name, seed)
    gradient = assert_same_as_reference(name, lp, inputs, given, **config)
    assert gradient.count_nonzero() > 0


@pytest.mark.parametrize("name", ["ppo", "cispo", "gspo"])
def test_the_defaults_clip_where_the_contract_says(name: str) -> None:
    lp, inputs = episode(name, drift=2.0)
    loss, _ = loss_and_gradient(name, lp, {}, **inputs)
    same, _ = loss_and_gradient(name, lp, WIDE if name == "cispo" else CLIP, **inputs)
    other, _ = loss_and_gradient(name, lp, TIGHT, **inputs)
    assert loss == same != other


@pytest.mark.parametrize("given", [("low", "high"), ("low",), ("high",)])
@pytest.mark.parametrize("name", CLIPPED_LOSSES)
def test_thresholds_of_a_token_override_the_setting(name: str, given: tuple[str, ...]) -> None:
    per_token = {"low": torch.linspace(0.7, 1.0, 40), "high": torch.linspace(1.0, 1.6, 40).flip(0)}
    changes = 0
    # Away from the sampler in both directions, so that gspo's one ratio comes to either bound.
    for shift in (-0.1, 0.1):
        lp, inputs = episode(name)
        without, _ = loss_and_gradient(name, lp + shift, CLIP, **inputs)
        for side in given:
            inputs[f"clip_{side}_threshold"] = per_token[side]
        assert_same_as_reference(name, lp + shift, inputs, CLIP, **CLIP)
        changes += loss_and_gradient(name, lp + shift, CLIP, **inputs)[0] != without
    assert changes


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "learns"),
    [
        (2.0, 1.0, -1.5, False),
        (2.0, -1.0, 2.0, True),
        (0.25, 1.0, -0.25, True),
        (0.25, -1.0, 0.5, False),
        (1.5, 1.0, -1.5, True),
        (0.5, -1.0, 0.5, True),
        (1.0, 1.0, -1.0, True),
    ],
    ids=["above", "above, worse", "below", "below, worse", "on the upper", "on the lower", "inside"],
)
def test_ppo_stops_learning_beyond_the_bound_that_the_advantage_pushes_to(
    ratio: float, advantage: float, loss: float, learns: bool
) -> None:
    q = torch.tensor([-1.0])
    lp = q + torch.tensor([ratio]).log()
    inputs = {"logprobs": q, "advantages": torch.tensor([advantage])}
    exact = float(torch.exp(lp - q))
    # A ratio that is meant to be on a bound is on it to the bit.
    config = {
        "clip_low_threshold": exact if ratio == 0.5 else 0.5,
        "clip_high_threshold": exact if ratio == 1.5 else 1.5,
    }
    result, gradient = loss_and_gradient("ppo", lp, config, **inputs)
    assert result == pytest.approx(loss)
    assert float(gradient) == (pytest.approx(-exact * advantage) if learns else 0.0)


def test_cispo_goes_on_learning_from_a_clipped_token_with_a_bounded_weight() -> None:
    inputs = {"logprobs": torch.tensor([-200.0, -1.0]), "advantages": torch.tensor([1.0, 2.0])}
    loss, gradient = loss_and_gradient("cispo", torch.tensor([-1.0, -200.0]), {}, **inputs)
    assert loss == 4.0
    assert gradient.tolist() == [-4.0, 0.0]


@pytest.mark.parametrize("name", ["ppo", "gspo"])
def test_a_ratio_that_overflows_behind_the_bound_is_clipped_like_any_other(name: str) -> None:
    inputs = {"logprobs": torch.tensor([-1000.0]), "advantages": torch.tensor([1.0])}
    if name == "gspo":
        inputs["sequence_ratio_mask"] = torch.ones(1)
    loss, gradient = loss_and_gradient(name, torch.tensor([-1.0]), {}, **inputs)
    assert loss == pytest.approx(-1.2)
    assert gradient.tolist() == [0.0]


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "gspo"])
def test_a_ratio_that_overflows_and_counts_gives_no_finite_gradient(name: str) -> None:
    inputs = {"logprobs": torch.tensor([-1000.0]), "advantages": torch.tensor([-1.0])}
    if name == "gspo":
        inputs["sequence_ratio_mask"] = torch.ones(1)
    loss, gradient = loss_and_gradient(name, torch.tensor([-1.0]), {}, **inputs)
    assert loss == math.inf
    assert not gradient.isfinite().any()


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_logprob_that_is_not_a_number_and_counts_does_not_pass_for_a_zero_gradient(name: str) -> None:
    lp, inputs = episode(name)
    lp[30] = math.nan
    loss, gradient = loss_and_gradient(name, lp, settings_of(name), **inputs)
    assert math.isnan(loss)
    assert not gradient.isfinite().all()


@pytest.mark.parametrize("garbage", [math.nan, -math.inf, math.inf, -1e30, 1e30])
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_garbage_without_an_advantage_changes_no_bit_of_loss_and_gradient(name: str, garbage: float) -> None:
    lp, inputs = episode(name)
    clean = loss_and_gradient(name, lp, settings_of(name), **inputs)
    lp = lp.clone()
    lp[:10] = garbage
    inputs["logprobs"] = inputs["logprobs"].clone()
    if name != "dro":  # where a logprob marks a position as sampled, which counts
        inputs["logprobs"][5:10] = -1e30
    loss, gradient = loss_and_gradient(name, lp, settings_of(name), **inputs)
    assert loss == clean[0]
    assert torch.equal(gradient, clean[1])
    assert gradient[:10].tolist() == [0.0] * 10


def test_dro_holds_a_sampled_token_without_advantage_to_its_logprob() -> None:
    lp, q = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.5, -2.0, 0.0])
    loss, gradient = loss_and_gradient("dro", lp, {"beta": 0.4}, logprobs=q, advantages=torch.zeros(3))
    assert loss == pytest.approx(0.5 * 0.4 * 0.5**2)
    assert gradient.tolist() == pytest.approx([0.4 * 0.5, 0.0, 0.0])


@pytest.mark.parametrize("name", [name for name in POLICY_LOSSES if name != "dro"])
def test_a_datum_without_any_advantage_contributes_exactly_nothing(name: str) -> None:
    lp, inputs = episode(name)
    inputs["advantages"] = torch.zeros(40)
    lp[12] = math.nan
    for mask in (inputs.get("sequence_ratio_mask"), torch.zeros(40)):
        if mask is not None and name == "gspo":
            inputs["sequence_ratio_mask"] = mask
        loss, gradient = loss_and_gradient(name, lp, settings_of(name), **inputs)
        assert loss == 0.0
        assert gradient.tolist() == [0.0] * 40


def test_gspo_takes_its_ratio_from_the_masked_tokens_only() -> None:
    lp, inputs = episode("gspo")
    inputs["sequence_ratio_mask"][10:25] = 0.0
    assert_same_as_reference("gspo", lp, inputs, {}, **CLIP)


def metric_parts(name: str, lp: torch.Tensor, inputs: dict[str, torch.Tensor]) -> dict[str, float]:
    loss, parts = LOSSES[name].compute(lp, inputs, settings_of(name))
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
        _, parts = LOSSES["cispo"].compute(lp, inputs, config)
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
    _, parts = LOSSES["ppo_critic"].compute(VALUES, inputs, {"value_clip": 0.2})
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
    _, parts = LOSSES["ppo_critic"].compute(
        torch.ones(2), {"values": zero, "returns": zero, "weights": zero}, {}
    )
    row = {"loss:sum": 0.0, **{name: float(part) for name, part in parts.items()}}
    assert not any(name.endswith(":mean") for name in combine_metrics("ppo_critic", [row]))
