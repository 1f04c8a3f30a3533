"""Bad data is refused before it reaches a trainer, with a sentence that says what to change."""

import array
import subprocess
import sys

import pytest

from services.common.errors import InvalidRequest
from services.common.loss_schema import check_datum, check_loss
from services.common.tensors import HostTensor

CODES = {"int32": "i", "int64": "q", "float32": "f"}


def tensor(dtype: str, values: list[float], *shape: int) -> HostTensor:
    converted = array.array(CODES[dtype], values if dtype == "float32" else [int(value) for value in values])
    return HostTensor(dtype, shape or (len(values),), converted.tobytes())


def check(
    loss_fn: str = "cross_entropy", tokens: HostTensor | None = None, **inputs: HostTensor | None
) -> None:
    defaults = {"target_tokens": tensor("int64", [2, 3, 4])}
    if loss_fn == "cross_entropy":
        defaults["weights"] = tensor("float32", [1, 0, -0.5])
    else:
        defaults |= {"logprobs": tensor("float32", [0, -1, -2]), "advantages": tensor("float32", [0, 1, -1])}
    merged = {name: value for name, value in {**defaults, **inputs}.items() if value is not None}
    check_datum(
        loss_fn,
        tokens or tensor("int32", [1, 2, 3]),
        merged,
        vocab_size=10,
        context_length=8,
        where="data[3]",
    )


@pytest.mark.parametrize("loss_fn", ["cross_entropy", "importance_sampling"])
def test_good_data_passes(loss_fn: str) -> None:
    check_loss(loss_fn, {})
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
        ({"weights": HostTensor("float32", (3,), b"\0" * 11)}, "11 bytes do not match shape"),
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


def test_an_unknown_loss_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidRequest, match="use one of cross_entropy"):
        check_loss("crossentropy", {})


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="'beta' is unknown; cross_entropy takes no settings"):
        check_loss("cross_entropy", {"beta": 0.1})


def test_the_schema_needs_no_torch() -> None:
    code = "import sys, services.common.loss_schema; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
