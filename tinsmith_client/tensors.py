"""Lists of numbers to the contract's tensors, and back, without numpy.

Invariant: bytes are little-endian, whatever the machine.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

from tinsmith.v1 import training_pb2, types_pb2

_DTYPES = {"i": types_pb2.DATA_TYPE_INT32, "q": types_pb2.DATA_TYPE_INT64, "f": types_pb2.DATA_TYPE_FLOAT32}


def datum(
    tokens: Sequence[int],
    target_tokens: Sequence[int],
    *,
    routed_experts: types_pb2.RoutedExperts | None = None,
    **inputs: Sequence[float],
) -> training_pb2.Datum:
    """A training example: position i reads tokens[i] and predicts target_tokens[i].

    Args:
        routed_experts: to replay: those of a sampled sequence, where `tokens` are its prompt and its tokens
            but the last one.
        inputs: the loss's other inputs, one number per position, such as weights, advantages, logprobs.
    """
    made = training_pb2.Datum(tokens=tensor("i", tokens), routed_experts=routed_experts)
    made.loss_inputs["target_tokens"].CopyFrom(tensor("q", target_tokens))
    for name, values in inputs.items():
        made.loss_inputs[name].CopyFrom(tensor("f", values))
    return made


def tensor(kind: str, values: Sequence[float]) -> types_pb2.Tensor:
    """A tensor of one dimension. `kind` is "i" (int32), "q" (int64) or "f" (float32)."""
    data = array(kind, values)
    if sys.byteorder == "big":
        data.byteswap()
    return types_pb2.Tensor(dtype=_DTYPES[kind], shape=[len(data)], data=data.tobytes())


def ints(data: bytes) -> list[int]:
    """The numbers of an int32 tensor's bytes."""
    return [int(value) for value in _read("i", data)]


def floats(data: bytes) -> list[float]:
    """The numbers of a float32 tensor's bytes."""
    return list(_read("f", data))


def _read(kind: str, data: bytes) -> array[float]:
    values: array[float] = array(kind)
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values
