"""What each loss function takes, and the checks every datum must pass. No torch: the gateway imports this.

Invariant: a datum that passed `check_datum`, of a loss that passed `check_loss`, cannot fail inside the
trainer for its shape, dtype, ids or values. What a loss does not use is refused, never ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from services.common.errors import InvalidRequest

ITEM_TYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "int64": np.dtype("<i8"),
    "int32": np.dtype("<i4"),
}


class ArrayLike(Protocol):
    """A dense row-major little-endian array in host memory."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def data(self) -> bytes: ...


@dataclass(frozen=True)
class InputSpec:
    """One named input of a loss, aligned with the datum's tokens.

    Attributes:
        dtype: "float32" or "int64".
        multi_target: shape [N, K] is allowed beside [N].
        token_ids: the values are vocabulary ids.
    """

    dtype: str
    multi_target: bool = False
    token_ids: bool = False


@dataclass(frozen=True)
class LossSchema:
    """Inputs of a loss (all of them required) and its settings with their defaults."""

    inputs: Mapping[str, InputSpec]
    config: Mapping[str, float] = field(default_factory=dict)


_POLICY_INPUTS = {
    "target_tokens": InputSpec("int64", token_ids=True),
    "logprobs": InputSpec("float32"),
    "advantages": InputSpec("float32"),
}

LOSS_SCHEMAS: dict[str, LossSchema] = {
    "cross_entropy": LossSchema(
        {
            "target_tokens": InputSpec("int64", multi_target=True, token_ids=True),
            "weights": InputSpec("float32", multi_target=True),
        }
    ),
    "importance_sampling": LossSchema(_POLICY_INPUTS),
}


def check_loss(loss_fn: str, loss_config: Mapping[str, float]) -> LossSchema:
    """The schema of a loss whose name and settings are valid.

    Raises:
        InvalidRequest: unknown loss, unknown setting, or a setting that is not a finite number.
    """
    schema = LOSS_SCHEMAS.get(loss_fn)
    if schema is None:
        raise InvalidRequest(
            f"loss_fn {loss_fn!r} is unknown; use one of {', '.join(sorted(LOSS_SCHEMAS))}", "unknown_loss"
        )
    for key, value in loss_config.items():
        if key not in schema.config:
            allowed = ", ".join(sorted(schema.config)) or "no settings"
            raise InvalidRequest(
                f"loss_fn_config key {key!r} is unknown; {loss_fn} takes {allowed}", "unknown_loss_config"
            )
        if not math.isfinite(value):
            raise InvalidRequest(f"loss_fn_config {key!r} must be a finite number, got {value}")
    return schema


def check_datum(
    loss_fn: str,
    tokens: ArrayLike,
    inputs: Mapping[str, ArrayLike],
    *,
    vocab_size: int,
    context_length: int,
    where: str = "datum",
) -> None:
    """Checks one datum of an operation.

    Args:
        loss_fn: a loss that `check_loss` knows.
        tokens: int32 [N], 1 <= N <= context_length, ids in [0, vocab_size).
        inputs: by name; exactly those of the loss's schema, each [N] (or [N, K]) and of its dtype.
        where: how messages call the datum, for example "data[3]".

    Raises:
        InvalidRequest: with a sentence that says what to change.
    """
    schema = LOSS_SCHEMAS[loss_fn]
    _check_tokens(tokens, vocab_size, context_length, where)
    missing = sorted(schema.inputs.keys() - inputs.keys())
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
    target_shape = tuple(inputs["target_tokens"].shape)
    for key, spec in schema.inputs.items():
        _check_input(f"{where}: {key}", spec, inputs[key], length, target_shape, vocab_size)


def _check_tokens(tokens: ArrayLike, vocab_size: int, context_length: int, where: str) -> None:
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
    _check_ids(_array(f"{where}: tokens", tokens), vocab_size, f"{where}: token")


def _check_input(
    label: str,
    spec: InputSpec,
    array: ArrayLike,
    length: int,
    target_shape: tuple[int, ...],
    vocab_size: int,
) -> None:
    shape = tuple(array.shape)
    if array.dtype != spec.dtype:
        raise InvalidRequest(f"{label} must be {spec.dtype}, got {array.dtype}", "wrong_dtype")
    if len(shape) not in ((1, 2) if spec.multi_target else (1,)):
        wanted = "[N] or [N, K]" if spec.multi_target else "[N]"
        raise InvalidRequest(f"{label} must have shape {wanted}, got {list(shape)}", "wrong_shape")
    if shape[0] != length:
        raise InvalidRequest(
            f"{label} has {shape[0]} positions but model_input has {length} tokens; they must be equal "
            "(position i predicts target_tokens[i])",
            "length_mismatch",
        )
    if shape != target_shape or shape[-1] == 0:
        raise InvalidRequest(
            f"{label} has shape {list(shape)} but target_tokens has {list(target_shape)}; they must be "
            "equal and not empty",
            "wrong_shape",
        )
    values = _array(label, array)
    if spec.token_ids:
        _check_ids(values, vocab_size, label)
    elif not np.isfinite(values).all():
        position = int(np.flatnonzero(~np.isfinite(values))[0])
        raise InvalidRequest(
            f"{label}[{position}] is {values[position]}; all values must be finite", "not_finite"
        )


def _array(label: str, array: ArrayLike) -> np.ndarray:
    dtype = ITEM_TYPES[array.dtype]
    if len(array.data) != math.prod(array.shape) * dtype.itemsize:
        raise InvalidRequest(
            f"{label}: {len(array.data)} bytes do not match shape {list(array.shape)} of {array.dtype}",
            "length_mismatch",
        )
    return np.frombuffer(array.data, dtype)


def _check_ids(ids: np.ndarray, vocab_size: int, label: str) -> None:
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise InvalidRequest(
            f"{label} id {low if low < 0 else high} is outside the vocabulary [0, {vocab_size}); "
            "use this model's tokenizer (mask a position by a zero weight or advantage, not by its id)",
            "token_out_of_range",
        )
