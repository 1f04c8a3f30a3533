"""Bad data is refused before it reaches a trainer, with a sentence that says what to change."""

import array
import subprocess
import sys

import pytest

from services.common.contract.errors import InvalidRequest
from services.common.contract.loss_schema import LOSS_SCHEMAS, check_datum, check_loss, settings
from services.common.contract.tensors import HostTensor

CODES = {"int32": "i", "int64": "q", "float32": "f"}


def tensor(dtype: str, values: list[float], *shape: int) -> HostTensor:
    converted = array.array(CODES[dtype], values if dtype == "float32" else [int(value) for value in values])
    return HostTensor(dtype, shape or (len(values),), converted.tobytes())


def check(
    loss_fn: str = "cross_entropy",
    tokens: HostTensor | None = None,
    config: dict[str, float] | None = None,
    **inputs: HostTensor | None,
) -> None:
    defaults = {"target_tokens": tensor("int64", [2, 3, 4])}
    if loss_fn == "cross_entropy":
        defaults["weights"] = tensor("float32", [1, 0, -0.5])
    else:
        defaults |= {"logprobs": tensor("float32", [0, -1, -2]), "advantages": tensor("float32", [0, 1, -1])}
    if loss_fn == "gspo":
        defaults["sequence_ratio_mask"] = tensor("float32", [0, 1, 1])
    if loss_fn == "ppo_critic":
        defaults = {name: tensor("float32", [0, 1, -2]) for name in ("values", "returns")}
    merged = {name: value for name, value in {**defaults, **inputs}.items() if value is not None}
    check_datum(
        loss_fn,
        config or {},
        tokens or tensor("int32", [1, 2, 3]),
        merged,
        vocab_size=10,
        context_length=8,
        where="data[3]",
    )


@pytest.mark.parametrize("loss_fn", LOSS_SCHEMAS)
def test_good_data_passes(loss_fn: str) -> None:
    check_loss(loss_fn, {"beta": 0.0} if loss_fn == "dro" else {})
    check(loss_fn)


def test_several_targets_per_position_pass_in_cross_entropy_only() -> None:
    targets = tensor("int64", [1, 2, 3, 4, 5, 6], 3, 2)
    check(target_tokens=targets, weights=tensor("float32", [1] * 6, 3, 2))
    with pytest.raises(InvalidRequest, match=r"target_tokens must have shape \[N\], got \[3, 2\]"):
        check("importance_sampling", target_tokens=targets)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": None}, "lacks weights; cross_entropy needs it"),
        ({"mask": tensor("float32", [1, 1, 1])}, "has mask, which cross_entropy does not use; remove it"),
        ({"weights": tensor("int64", [1, 1, 1])}, "weights must be float32, got int64"),
        ({"target_tokens": tensor("int32", [1, 1, 1])}, "target_tokens must be int64, got int32"),
        ({"target_tokens": tensor("int64", [1, 2])}, "has 2 positions but model_input has 3 tokens"),
        ({"weights": tensor("float32", [1, 1])}, "has 2 positions but model_input has 3 tokens"),
        ({"weights": tensor("float32", [1] * 6, 3, 2)}, r"\[3, 2\] but target_tokens has \[3\]"),
        ({"target_tokens": tensor("int64", [1, 10, 1])}, r"id 10 is outside the vocabulary \[0, 10\)"),
        ({"target_tokens": tensor("int64", [1, -100, 1])}, "id -100 is outside the vocabulary"),
        ({"weights": tensor("float32", [1, float("nan"), 1])}, r"weights\[1\] is nan"),
        ({"weights": tensor("float32", [1, 1, float("inf")])}, r"weights\[2\] is inf"),
        ({"weights": HostTensor("float32", (3,), b"\0" * 11)}, "11 bytes of data do not match shape"),
        ({"tokens": tensor("int32", [])}, "give at least one token"),
        ({"tokens": tensor("int32", [1, 2, 99])}, "token id 99 is outside the vocabulary"),
        ({"tokens": tensor("int64", [1, 2, 3])}, "tokens must be int32"),
        ({"tokens": tensor("int32", [1] * 9)}, "9 tokens are more than the model's context length of 8"),
    ],
)
def test_bad_data_is_refused_with_what_to_change(change: dict[str, HostTensor | None], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as error:
        check(**change)  # type: ignore[arg-type]
    assert error.value.message.startswith("data[3]: ")


def test_weights_are_refused_where_advantages_decide() -> None:
    with pytest.raises(InvalidRequest, match="has weights, which importance_sampling does not use"):
        check("importance_sampling", weights=tensor("float32", [1, 1, 1]))


@pytest.mark.parametrize("loss_fn", ["ppo", "cispo", "gspo"])
def test_clip_thresholds_of_the_tokens_are_optional(loss_fn: str) -> None:
    low, high = tensor("float32", [0, 0.5, 0.9]), tensor("float32", [4, 5, 6])
    check(loss_fn, clip_low_threshold=low)
    check(loss_fn, clip_high_threshold=high)
    check(loss_fn, clip_low_threshold=low, clip_high_threshold=high)


def test_a_threshold_that_equals_the_setting_in_float32_is_not_above_it() -> None:
    config = {"clip_low_threshold": 0.7, "clip_high_threshold": 0.7}
    check("ppo", config=config, clip_low_threshold=tensor("float32", [0.7] * 3))
    check("ppo", config=config, clip_high_threshold=tensor("float32", [0.7] * 3))


@pytest.mark.parametrize(
    ("loss_fn", "change", "message"),
    [
        ("ppo", {"logprobs": None}, "lacks logprobs; ppo needs it"),
        ("ppo", {"sequence_ratio_mask": tensor("float32", [1, 1, 1])}, "which ppo does not use"),
        ("dro", {"clip_low_threshold": tensor("float32", [0, 0, 0])}, "which dro does not use"),
        (
            "ppo",
            {"clip_low_threshold": tensor("float32", [0.1, -0.1, 0])},
            r"threshold\[1\] is -0.1.*0 or more",
        ),
        ("ppo", {"clip_high_threshold": tensor("float32", [2, 2])}, "has 2 positions"),
        ("ppo", {"clip_high_threshold": tensor("int64", [2, 2, 2])}, "must be float32, got int64"),
        ("ppo", {"clip_high_threshold": tensor("float32", [2, 2, float("inf")])}, r"threshold\[2\] is inf"),
        (
            "cispo",
            {
                "clip_low_threshold": tensor("float32", [0, 0, 1.5]),
                "clip_high_threshold": tensor("float32", [1, 1, 1.25]),
            },
            "at position 2 clip_low_threshold 1.5 is above clip_high_threshold 1.25",
        ),
        (
            "ppo",
            {"clip_high_threshold": tensor("float32", [2, 0.5, 2])},
            r"at position 1 clip_low_threshold 0.8\d* is above clip_high_threshold 0.5",
        ),
        ("gspo", {"sequence_ratio_mask": tensor("float32", [0, 0, 0])}, "0 everywhere.*set it to 1"),
    ],
)
def test_bad_data_of_a_policy_loss_is_refused(
    loss_fn: str, change: dict[str, HostTensor | None], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message) as error:
        check(loss_fn, **change)  # type: ignore[arg-type]
    assert error.value.message.startswith("data[3]: ")


def test_thresholds_of_the_tokens_are_held_against_the_settings_of_the_request() -> None:
    thresholds = tensor("float32", [1.5] * 3)
    check("ppo", config={"clip_high_threshold": 2.0}, clip_low_threshold=thresholds)
    with pytest.raises(InvalidRequest, match="is above"):
        check("ppo", clip_low_threshold=thresholds)


def test_a_datum_without_advantages_needs_no_sequence_ratio() -> None:
    zeros = tensor("float32", [0, 0, 0])
    check("gspo", sequence_ratio_mask=zeros, advantages=zeros)


def test_an_unknown_loss_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidRequest, match="use one of cross_entropy"):
        check_loss("crossentropy", {})


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="'beta' is unknown; cross_entropy takes no settings"):
        check_loss("cross_entropy", {"beta": 0.1})


@pytest.mark.parametrize("loss_fn", ["stable_reinforce", "custom"])
def test_a_loss_that_cannot_be_served_is_refused_with_those_to_use(loss_fn: str) -> None:
    with pytest.raises(InvalidRequest, match=f"'{loss_fn}' is not served.*use.* importance_sampling, ppo"):
        check_loss(loss_fn, {"kl_coeff": 0.01})


@pytest.mark.parametrize("loss_fn", ["ppo", "cispo", "gspo"])
@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"clip_low_threshold": -0.1}, "'clip_low_threshold' must be a finite number, 0 or more"),
        ({"clip_high_threshold": float("nan")}, "finite"),
        ({"clip_high_threshold": float("inf")}, "finite"),
        ({"clip_high_threshold": 1e39}, "in float32"),
        ({"clip_low_threshold": 1.5, "clip_high_threshold": 1.25}, "1.5 is above clip_high_threshold 1.25"),
        ({"clip_low_threshold": 5.0}, "5.0 is above clip_high_threshold"),
        ({"epsilon": 0.2}, "'epsilon' is unknown; .* takes clip_high_threshold, clip_low_threshold"),
        ({"beta": 0.2}, "'beta' is unknown"),
    ],
)
def test_settings_out_of_range_are_refused(loss_fn: str, config: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        check_loss(loss_fn, config)


def test_dro_needs_its_beta() -> None:
    with pytest.raises(InvalidRequest, match=r"lacks beta; dro has no default.*\{'beta': 0.05\}"):
        check_loss("dro", {})
    with pytest.raises(InvalidRequest, match="0 or more"):
        check_loss("dro", {"beta": -1.0})


def test_settings_that_are_not_given_have_their_defaults() -> None:
    assert settings("ppo", {}) == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    assert settings("cispo", {}) == {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}
    assert settings("gspo", {"clip_high_threshold": 2.0}) == {
        "clip_low_threshold": 0.8,
        "clip_high_threshold": 2.0,
    }
    assert settings("dro", {"beta": 0.5}) == {"beta": 0.5}


def test_the_schema_needs_no_torch() -> None:
    code = "import sys, services.common.contract.loss_schema; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
