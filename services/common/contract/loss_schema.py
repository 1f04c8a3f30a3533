"""What each loss function takes, and the checks every datum must pass. No torch: the gateway imports this.

Invariant: a datum that passed `check_datum`, of a loss that passed `check_loss`, cannot fail inside the
trainer for its shape, dtype, ids or values. What a loss does not use is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from services.common.contract.errors import InvalidRequest
from services.common.contract.tensors import HostTensor


@dataclass(frozen=True)
class InputSpec:
    """One named input of a loss, aligned with the datum's tokens.

    Attributes:
        dtype: "float32" or "int64".
        multi_target: shape [N, K] is allowed beside [N].
        token_ids: the values are vocabulary ids.
        required: every datum must have it.
        non_negative: no value may be below 0.
    """

    dtype: str
    multi_target: bool = False
    token_ids: bool = False
    required: bool = True
    non_negative: bool = False


@dataclass(frozen=True)
class LossSchema:
    """Inputs of a loss and its settings.

    Attributes:
        config: default of each setting; None: it has none and must be given.
    """

    inputs: Mapping[str, InputSpec]
    config: Mapping[str, float | None] = field(default_factory=dict)


CLIP_LOW = "clip_low_threshold"
CLIP_HIGH = "clip_high_threshold"
SEQUENCE_RATIO_MASK = "sequence_ratio_mask"
VALUE_CLIP = "value_clip"
TARGETS = "target_tokens"

_POLICY_INPUTS = {
    "target_tokens": InputSpec("int64", token_ids=True),
    "logprobs": InputSpec("float32"),
    "advantages": InputSpec("float32"),
}
_CLIPPED_INPUTS = {
    **_POLICY_INPUTS,
    CLIP_LOW: InputSpec("float32", required=False, non_negative=True),
    CLIP_HIGH: InputSpec("float32", required=False, non_negative=True),
}

LOSS_SCHEMAS: dict[str, LossSchema] = {
    "cross_entropy": LossSchema(
        {
            "target_tokens": InputSpec("int64", multi_target=True, token_ids=True),
            "weights": InputSpec("float32", multi_target=True),
        }
    ),
    "importance_sampling": LossSchema(_POLICY_INPUTS),
    "ppo": LossSchema(_CLIPPED_INPUTS, {CLIP_LOW: 0.8, CLIP_HIGH: 1.2}),
    "cispo": LossSchema(_CLIPPED_INPUTS, {CLIP_LOW: 0.0, CLIP_HIGH: 4.0}),
    "dro": LossSchema(_POLICY_INPUTS, {"beta": None}),
    "gspo": LossSchema(
        {**_CLIPPED_INPUTS, SEQUENCE_RATIO_MASK: InputSpec("float32", required=False)},
        {CLIP_LOW: 0.8, CLIP_HIGH: 1.2},
    ),
    # The loss of a critic (`roles.py`): it predicts values, not tokens.
    "ppo_critic": LossSchema(
        {
            "values": InputSpec("float32"),
            "returns": InputSpec("float32"),
            "weights": InputSpec("float32", required=False, non_negative=True),
        },
        {VALUE_CLIP: 0.0},
    ),
}

# Losses that the SDK can name and that cannot be served, with what to do instead.
_UNSERVED = {
    "stable_reinforce": (
        "its formula is not public; use importance_sampling, ppo, cispo, dro or gspo, or have the operator "
        "let one of them run in its place (--stable-reinforce-as)"
    ),
    "custom": (
        "no loss graph is run on the server; use the SDK's forward_backward_custom, which computes any loss "
        "on the client, or one of importance_sampling, ppo, cispo, dro, gspo and cross_entropy"
    ),
}

_LARGEST = float(np.finfo(np.float32).max)


def settings(loss_fn: str, loss_config: Mapping[str, float]) -> dict[str, float]:
    """All settings of a loss: the given ones, else their defaults. One without a default may be absent."""
    defaults = LOSS_SCHEMAS[loss_fn].config
    return {**{key: value for key, value in defaults.items() if value is not None}, **loss_config}


def check_served(loss_fn: str) -> None:
    """Refuses a loss that the SDK can name and that cannot be served.

    Raises:
        InvalidRequest: it is one of those; says what to use instead.
    """
    if loss_fn in _UNSERVED:
        raise InvalidRequest(f"loss_fn {loss_fn!r} is not served: {_UNSERVED[loss_fn]}", "unserved_loss")


def check_loss(loss_fn: str, loss_config: Mapping[str, float]) -> LossSchema:
    """The schema of a loss whose name and settings are valid.

    Raises:
        InvalidRequest: a loss that is unknown or cannot be served; a setting that is unknown, missing,
            negative or not a finite float32; a lower clip threshold above the upper one.
    """
    check_served(loss_fn)
    schema = LOSS_SCHEMAS.get(loss_fn)
    if schema is None:
        raise InvalidRequest(
            f"loss_fn {loss_fn!r} is unknown; use one of {', '.join(LOSS_SCHEMAS)}", "unknown_loss"
        )
    for key, value in loss_config.items():
        if key not in schema.config:
            allowed = ", ".join(sorted(schema.config)) or "no settings"
            raise InvalidRequest(
                f"loss_fn_config key {key!r} is unknown; {loss_fn} takes {allowed}", "unknown_loss_config"
            )
        if not 0 <= value <= _LARGEST:
            raise InvalidRequest(
                f"loss_fn_config {key!r} must be a finite number, 0 or more (in float32), got {value}",
                "loss_config_out_of_range",
            )
    complete = settings(loss_fn, loss_config)
    missing = ", ".join(sorted(schema.config.keys() - complete.keys()))
    if missing:
        raise InvalidRequest(
            f"loss_fn_config lacks {missing}; {loss_fn} has no default for it, so pass for example "
            f"loss_fn_config={{{missing!r}: 0.05}}",
            "missing_loss_config",
        )
    if CLIP_LOW in complete and complete[CLIP_LOW] > complete[CLIP_HIGH]:
        raise InvalidRequest(
            f"loss_fn_config {CLIP_LOW} {complete[CLIP_LOW]} is above {CLIP_HIGH} {complete[CLIP_HIGH]}; "
            "they bound the ratio itself, not its distance from 1",
            "loss_config_out_of_range",
        )
    return schema


def check_datum(
    loss_fn: str,
    loss_config: Mapping[str, float],
    tokens: HostTensor,
    inputs: Mapping[str, HostTensor],
    *,
    vocab_size: int,
    context_length: int,
    where: str = "datum",
) -> None:
    """Checks one datum of an operation.

    Args:
        loss_fn, loss_config: of an operation that passed `check_loss`.
        tokens: int32 [N], 1 <= N <= context_length, ids in [0, vocab_size).
        inputs: by name; those of the loss's schema and no others, each [N] (or [N, K]) and of its dtype.
        where: how messages call the datum, for example "data[3]".

    Raises:
        InvalidRequest: with a sentence that says what to change.
    """
    schema = LOSS_SCHEMAS[loss_fn]
    _check_tokens(tokens, vocab_size, context_length, where)
    missing = sorted(key for key, spec in schema.inputs.items() if spec.required and key not in inputs)
    if missing:
        raise InvalidRequest(
            f"{where}: loss_fn_inputs lacks {', '.join(missing)}; {loss_fn} needs it", "missing_loss_input"
        )
    extra = sorted(inputs.keys() - schema.inputs.keys())
    if extra:
        raise InvalidRequest(
            f"{where}: loss_fn_inputs has {', '.join(extra)}, which {loss_fn} does not use; remove it "
            f"(it takes {', '.join(sorted(schema.inputs))})",
            "unknown_loss_input",
        )
    length = tokens.shape[0]
    target_shape = tuple(inputs[TARGETS].shape) if TARGETS in schema.inputs else (length,)
    values = {
        key: _checked_input(f"{where}: {key}", spec, inputs[key], length, target_shape, vocab_size)
        for key, spec in schema.inputs.items()
        if key in inputs
    }
    if CLIP_LOW in schema.inputs:
        _check_clip_range(where, values, settings(loss_fn, loss_config))
    if SEQUENCE_RATIO_MASK in values and values["advantages"].any() and not values[SEQUENCE_RATIO_MASK].any():
        raise InvalidRequest(
            f"{where}: {SEQUENCE_RATIO_MASK} is 0 everywhere, so the sequence has no ratio; set it to 1 at "
            "the sampled tokens",
            "empty_sequence_ratio_mask",
        )


def _check_clip_range(where: str, values: Mapping[str, np.ndarray], config: Mapping[str, float]) -> None:
    # Settings as float32, as they are applied: 0.8 in the datum is above the Python float 0.8.
    low, high = (np.atleast_1d(values.get(key, np.float32(config[key]))) for key in (CLIP_LOW, CLIP_HIGH))
    crossed = np.flatnonzero(low > high)
    if crossed.size:
        place = int(crossed[0])
        raise InvalidRequest(
            f"{where}: at position {place} {CLIP_LOW} {low[min(place, low.size - 1)]} is above {CLIP_HIGH} "
            f"{high[min(place, high.size - 1)]} (what the datum lacks comes from loss_fn_config)",
            "clip_range_crossed",
        )


def _check_tokens(tokens: HostTensor, vocab_size: int, context_length: int, where: str) -> None:
    if tokens.dtype != "int32" or len(tokens.shape) != 1:
        raise InvalidRequest(
            f"{where}: tokens must be int32 of shape [N], got {tokens.dtype} of shape {list(tokens.shape)}"
        )
    length = tokens.shape[0]
    if length == 0:
        raise InvalidRequest(f"{where}: model_input is empty; give at least one token", "empty_datum")
    if length > context_length:
        raise InvalidRequest(
            f"{where}: {length} tokens are more than the model's context length of {context_length}; "
            "shorten the input",
            "context_length_exceeded",
        )
    _check_ids(tokens.check(f"{where}: tokens").values(), vocab_size, f"{where}: token")


def _checked_input(
    label: str,
    spec: InputSpec,
    array: HostTensor,
    length: int,
    target_shape: tuple[int, ...],
    vocab_size: int,
) -> np.ndarray:
    """The elements, row-major and flat, of an input that fits its description and the datum."""
    shape = tuple(array.shape)
    if array.dtype != spec.dtype:
        raise InvalidRequest(f"{label} must be {spec.dtype}, got {array.dtype}", "wrong_dtype")
    if len(shape) not in ((1, 2) if spec.multi_target else (1,)):
        wanted = "[N] or [N, K]" if spec.multi_target else "[N]"
        raise InvalidRequest(f"{label} must have shape {wanted}, got {list(shape)}", "wrong_shape")
    if shape[0] != length:
        raise InvalidRequest(
            f"{label} has {shape[0]} positions but model_input has {length} tokens; they must be equal "
            "(position i is the one after token i)",
            "length_mismatch",
        )
    if shape != target_shape or shape[-1] == 0:
        raise InvalidRequest(
            f"{label} has shape {list(shape)} but target_tokens has {list(target_shape)}; they must be "
            "equal and not empty",
            "wrong_shape",
        )
    if len(shape) == 2:
        check_columns(shape[1], vocab_size, label)
    values = array.check(label).values().ravel()
    if spec.token_ids:
        _check_ids(values, vocab_size, label)
    elif not np.isfinite(values).all():
        position = int(np.flatnonzero(~np.isfinite(values))[0])
        raise InvalidRequest(
            f"{label}[{position}] is {values[position]}; all values must be finite", "not_finite"
        )
    elif spec.non_negative and (values < 0).any():
        position = int(np.flatnonzero(values < 0)[0])
        raise InvalidRequest(
            f"{label}[{position}] is {values[position]}; it must be 0 or more", "negative_value"
        )
    return values


def check_columns(columns: int, vocab_size: int, label: str) -> None:
    """Refuses more targets at a position than there are tokens.

    Raises:
        InvalidRequest: there are.
    """
    if columns > vocab_size:
        raise InvalidRequest(
            f"{label} has {columns} targets at each position; send at most {vocab_size}, as many as tokens "
            "are in the vocabulary",
            "wrong_shape",
        )


def _check_ids(ids: np.ndarray, vocab_size: int, label: str) -> None:
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise InvalidRequest(
            f"{label} id {low if low < 0 else high} is outside the vocabulary [0, {vocab_size}); "
            "use this model's tokenizer (mask a position by a zero weight or advantage, not by its id)",
            "token_out_of_range",
        )
