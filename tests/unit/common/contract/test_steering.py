"""What changes which tokens are likely: what is taken, and what is refused with which sentence."""

from __future__ import annotations

import math

import pytest

from services.common.contract import steering
from services.common.contract.errors import InvalidRequest
from services.common.contract.steering import Steering
from tinsmith.v1 import sampling_pb2

VOCAB = 100


def test_what_is_left_out_changes_nothing() -> None:
    assert steering.from_pb(sampling_pb2.SamplingParams()) == Steering()
    steering.check(Steering(), VOCAB)


def test_everything_is_read() -> None:
    asked = sampling_pb2.SamplingParams(
        min_p=0.25,
        frequency_penalty=-2,
        presence_penalty=2,
        repetition_penalty=0.5,
        logit_bias=[sampling_pb2.LogitBias(token_id=99, bias=-100), sampling_pb2.LogitBias(bias=0.5)],
        bad_words=["sure", "of course"],
    )
    read = steering.from_pb(asked)
    assert read == Steering(0.25, -2, 2, 0.5, {99: -100, 0: 0.5}, ("sure", "of course"))
    steering.check(read, VOCAB)


def test_a_token_has_one_bias() -> None:
    twice = sampling_pb2.SamplingParams(logit_bias=[sampling_pb2.LogitBias(token_id=3)] * 2)
    with pytest.raises(InvalidRequest, match="names token 3 twice"):
        steering.from_pb(twice)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (Steering(min_p=-0.1), "min_p is -0.1; it must be 0 to 1"),
        (Steering(min_p=math.nan), "min_p is nan"),
        (Steering(frequency_penalty=2.1), "frequency_penalty is 2.1; it must be -2 to 2"),
        (Steering(presence_penalty=math.inf), "presence_penalty is inf"),
        (Steering(repetition_penalty=0.0), "repetition_penalty is 0.0; it must be 0.1 to 10"),
        (Steering(logit_bias={VOCAB: 1}), "names token 100; the model's ids are 0 to 99"),
        (Steering(logit_bias={-1: 1}), "names token -1"),
        (Steering(logit_bias={5: math.nan}), "token 5 is nan"),
        (Steering(logit_bias={5: 100.5}), "token 5 is 100.5; it must be -100 to 100"),
        (Steering(logit_bias=dict.fromkeys(range(1025), 0.0)), "1025 tokens; send at most 1024"),
        (Steering(bad_words=("",)), "1 to 128 characters"),
        (Steering(bad_words=("  ",)), "not be blank"),
        (Steering(bad_words=("x" * 129,)), "1 to 128 characters"),
        (Steering(bad_words=("x",) * 65), "bad_words has 65; send at most 64"),
    ],
)
def test_what_has_no_meaning_is_refused(asked: Steering, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        steering.check(asked, VOCAB)
    assert says in caught.value.message
    assert (caught.value.field or "").startswith("params.")


def test_a_constraint_has_a_size() -> None:
    steering.check_constraint("x" * steering.MAX_CONSTRAINT_BYTES, "regex")
    for source in ("", "ä" * (steering.MAX_CONSTRAINT_BYTES // 2 + 1)):
        with pytest.raises(InvalidRequest, match="regex has"):
            steering.check_constraint(source, "regex")


def test_constrained_text_ends_where_it_matches_or_at_a_string() -> None:
    steering.check_constrained(never_stops=False, stops_at_tokens=False)
    for name, asked in (("never", (True, False)), ("tokens", (False, True))):
        with pytest.raises(InvalidRequest, match=rf"stop is {name}.* choose model_eos, or strings") as error:
            steering.check_constrained(*asked)
        assert error.value.field == "params.stop"


@pytest.mark.parametrize(
    ("asked", "stops_at_text", "constrained", "names"),
    [
        (Steering(frequency_penalty=0.5), False, False, "frequency_penalty"),
        (Steering(presence_penalty=-0.5), False, False, "presence_penalty"),
        (Steering(bad_words=("no",)), False, False, "bad_words"),
        (Steering(), True, False, "stop strings"),
        (Steering(), False, True, "constraint"),
    ],
)
def test_what_looks_back_at_what_was_sampled_is_refused_over_a_change_of_weights(
    asked: Steering, stops_at_text: bool, constrained: bool, names: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"{names} cannot be followed") as error:
        steering.check_continued(asked, stops_at_text, constrained)
    assert error.value.field == "on_update"


def test_what_looks_at_one_token_or_at_prompt_and_output_alike_is_followed_over_a_change_of_weights() -> None:
    steering.check_continued(Steering(0.1, 0.0, 0.0, 1.5, {3: 1.0}), False, False)
