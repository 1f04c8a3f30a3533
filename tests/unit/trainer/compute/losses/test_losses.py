"""The losses are the token sums of the Tinker contract, and masked positions are inert."""

import math

import pytest
import torch

from services.common.contract.loss_schema import LOSS_SCHEMAS
from services.trainer.compute.losses import LOSSES
from tests.unit.trainer.compute.losses.policy_batches import (
    CLIP,
    CLIPPED_LOSSES,
    POLICY_LOSSES,
    TIGHT,
    WIDE,
    episode,
    loss_and_gradient,
    settings_of,
)

LOGPROBS = torch.tensor([-1.0, -2.5, -0.25, -4.0])


def test_every_described_loss_is_implemented_and_the_other_way_round() -> None:
    assert LOSSES.keys() == LOSS_SCHEMAS.keys()
    assert LOSSES.keys() - {"cross_entropy", "ppo_critic"} == set(POLICY_LOSSES)
    assert {name for name, _, _ in POLICY} == set(POLICY_LOSSES)


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


def test_gspo_without_a_mask_has_the_ratio_of_the_sampled_tokens() -> None:
    lp, inputs = episode("gspo")
    assert (inputs["advantages"] == 0).sum() > (inputs["logprobs"] == 0).sum()
    expected = loss_and_gradient("gspo", lp, **inputs)
    mask = inputs.pop("sequence_ratio_mask")
    assert mask.tolist() == (inputs["logprobs"] != 0).float().tolist()
    loss, gradient = loss_and_gradient("gspo", lp, **inputs)
    assert loss == expected[0]
    assert gradient.tolist() == expected[1].tolist()


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
