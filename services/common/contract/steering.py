"""What a sample may ask for that changes which tokens are likely: rules that gateway and sampler share.

Invariant: what passes here the engine does as it is said, nothing is clamped. Log-probabilities that are told
are the model's own all the same, unless the request asks for those of what it is sampled from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from services.common.contract.errors import InvalidRequest
from tinsmith.v1 import sampling_pb2

MAX_BIASES = 1024
MAX_BIAS = 100.0
MAX_BAD_WORDS = 64
MAX_BAD_WORD_CHARS = 128
MAX_CONSTRAINT_BYTES = 64 * 1024

_PENALTY = (-2.0, 2.0)
_REPETITION = (0.1, 10.0)


class Steering(msgspec.Struct, frozen=True):
    """What is done to the logits; see SamplingParams in sampling.proto. The defaults change nothing.

    Attributes:
        logit_bias: by token id.
    """

    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = msgspec.field(default_factory=dict)
    bad_words: tuple[str, ...] = ()


_NOTHING = Steering()


def from_pb(pb: sampling_pb2.SamplingParams) -> Steering:
    """
    Raises:
        InvalidRequest: a token has two biases.
    """
    biases: dict[int, float] = {}
    for one in pb.logit_bias:
        if one.token_id in biases:
            raise InvalidRequest(
                f"logit_bias names token {one.token_id} twice; add the two up", field="params.logit_bias"
            )
        biases[one.token_id] = one.bias
    return Steering(
        min_p=pb.min_p,
        frequency_penalty=pb.frequency_penalty,
        presence_penalty=pb.presence_penalty,
        repetition_penalty=pb.repetition_penalty if pb.HasField("repetition_penalty") else 1.0,
        logit_bias=biases,
        bad_words=tuple(pb.bad_words),
    )


def check_continued(steering: Steering, stops_at_text: bool, constrained: bool) -> None:
    """Refuses what an engine that goes on with a sequence on other weights would not do exactly: to it, what
    was sampled before is a part of the prompt.

    Raises:
        InvalidRequest: with what to change.
    """
    for name, asked in (
        ("frequency_penalty", steering.frequency_penalty != 0.0),
        ("presence_penalty", steering.presence_penalty != 0.0),
        ("bad_words", bool(steering.bad_words)),
        ("stop strings", stops_at_text),
        ("constraint", constrained),
    ):
        if asked:
            raise InvalidRequest(
                f"{name} cannot be followed over a change of weights; leave it out, or have the sample "
                "finish on the weights it began with",
                field="on_update",
            )


def check(steering: Steering, vocab_size: int) -> None:
    """Refuses what the engine would not do exactly as asked.

    Raises:
        InvalidRequest: with what to change.
    """
    if steering == _NOTHING:
        return
    _in_range("min_p", steering.min_p, (0.0, 1.0))
    _in_range("frequency_penalty", steering.frequency_penalty, _PENALTY)
    _in_range("presence_penalty", steering.presence_penalty, _PENALTY)
    _in_range("repetition_penalty", steering.repetition_penalty, _REPETITION)
    _check_biases(steering.logit_bias, vocab_size)
    words = steering.bad_words
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequest(
            f"bad_words has {len(words)}; send at most {MAX_BAD_WORDS}", field="params.bad_words"
        )
    if not all(1 <= len(word) <= MAX_BAD_WORD_CHARS and word.strip() for word in words):
        raise InvalidRequest(
            f"each of bad_words must have 1 to {MAX_BAD_WORD_CHARS} characters and not be blank",
            field="params.bad_words",
        )


def check_constraint(source: str, what: str) -> None:
    """
    Raises:
        InvalidRequest: it is empty or too long.
    """
    size = len(source.encode())
    if not 1 <= size <= MAX_CONSTRAINT_BYTES:
        raise InvalidRequest(f"{what} has {size} bytes; send 1 to {MAX_CONSTRAINT_BYTES}")


def check_constrained(never_stops: bool, stops_at_tokens: bool) -> None:
    """Refuses stop conditions that an engine would not follow as asked beside a constraint. Its grammar
    allows what ends a sequence, end-of-sequence and stop tokens, where the text matches as a whole and
    nowhere else: a stop token could not be sampled where the text needs it, and where end-of-sequence does
    not stop, what comes after it would be free.

    Raises:
        InvalidRequest: with what to change.
    """
    for name, asked in (("never", never_stops), ("tokens", stops_at_tokens)):
        if asked:
            raise InvalidRequest(
                f"stop is {name}, and text that must match a constraint ends where it matches, with the "
                "model's end-of-sequence token; choose model_eos, or strings, at which it ends sooner",
                field="params.stop",
            )


def _in_range(name: str, value: float, bounds: tuple[float, float]) -> None:
    low, high = bounds
    if not low <= value <= high:
        raise InvalidRequest(f"{name} is {value}; it must be {low:g} to {high:g}", field=f"params.{name}")


def _check_biases(biases: Mapping[int, float], vocab_size: int) -> None:
    where = "params.logit_bias"
    if len(biases) > MAX_BIASES:
        raise InvalidRequest(f"logit_bias has {len(biases)} tokens; send at most {MAX_BIASES}", field=where)
    for token, bias in biases.items():
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"logit_bias names token {token}; the model's ids are 0 to {vocab_size - 1}",
                "token_out_of_range",
                field=where,
            )
        if math.isnan(bias) or abs(bias) > MAX_BIAS:
            raise InvalidRequest(
                f"logit_bias of token {token} is {bias}; it must be -{MAX_BIAS:g} to {MAX_BIAS:g}",
                field=where,
            )
