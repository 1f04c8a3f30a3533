"""The SDK's forward_backward message, translated to the operation that the journal holds.

Invariant: what comes out is dense: one int32 token tensor per datum and dense loss inputs, whose
total size was bounded before anything was allocated. Whatever is not served raises a sentence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from google.protobuf.message import DecodeError

from services.common.contract.errors import InvalidRequest, TooLarge
from services.gateway.edge.unknown_fields import refuse_unknown
from tinsmith.v1 import operation_pb2, tinker_pb2, types_pb2

_NUMPY: dict[int, np.dtype] = {
    tinker_pb2.TINKER_DATA_TYPE_FLOAT32: np.dtype("<f4"),
    tinker_pb2.TINKER_DATA_TYPE_INT64: np.dtype("<i8"),
    tinker_pb2.TINKER_DATA_TYPE_INT32: np.dtype("<i4"),
    # Only moved, never computed with.
    tinker_pb2.TINKER_DATA_TYPE_BFLOAT16: np.dtype("<u2"),
}
_UNSERVED_CHUNKS = {"image": "images", "dmel": "audio"}


def parse_request(body: bytes) -> tinker_pb2.TinkerForwardBackwardRequest:
    """The body of POST forward_backward.

    Raises:
        InvalidRequest: the bytes are no such message.
    """
    message = tinker_pb2.TinkerForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise InvalidRequest(f"the body is no ForwardBackwardRequest: {error}", "bad_body") from error
    return message


def forward_backward(
    message: tinker_pb2.TinkerForwardBackwardRequest, max_bytes: int
) -> operation_pb2.ForwardBackward:
    """The operation that a request asks for. Proportional to the data: run in a thread.

    Args:
        max_bytes: largest total of dense tensor bytes.

    Raises:
        InvalidRequest: a tensor is malformed, or something is asked for that is not served.
        TooLarge: the dense tensors would be larger than `max_bytes`.
    """
    refuse_unknown(message, "the request")
    operation = operation_pb2.ForwardBackward(loss_fn=message.loss_fn, forward_only=message.forward_only)
    operation.loss_config.update(_loss_config(message))
    left = max_bytes
    for index, datum in enumerate(message.data):
        where = f"data[{index}]"
        refuse_unknown(datum, where)
        target = operation.data.add()
        target.tokens.CopyFrom(_tokens(datum.model_input, where))
        left -= len(target.tokens.data)
        for name, tensor in datum.loss_fn_inputs.items():
            dense = _dense(tensor, f"{where}.{name}", left)
            left -= len(dense.data)
            target.loss_inputs[name].CopyFrom(dense)
        if left < 0:
            raise _too_large(max_bytes)
        _check_spans(datum, target, where)
    return operation


def _loss_config(message: tinker_pb2.TinkerForwardBackwardRequest) -> dict[str, float]:
    if not message.loss_fn_config_v2:
        return dict(message.loss_fn_config)
    config = {}
    for name, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            raise InvalidRequest(f"loss_fn_config {name!r} must be a number; no served loss takes text")
        config[name] = value.number
    return config


def _tokens(chunks: Iterable[tinker_pb2.TinkerChunk], where: str) -> types_pb2.Tensor:
    """All text chunks of a model input as one int32 tensor."""
    parts = []
    for chunk in chunks:
        refuse_unknown(chunk, f"{where}.model_input")
        kind = chunk.WhichOneof("kind")
        if kind != "encoded_text":
            what = _UNSERVED_CHUNKS.get(kind or "", "this kind of chunk")
            raise InvalidRequest(f"{where}: {what} in model_input is not served; send text tokens only")
        tokens = chunk.encoded_text.tokens
        if len(tokens) % 4:
            raise InvalidRequest(f"{where}: tokens are {len(tokens)} bytes, not a multiple of 4")
        parts.append(tokens)
    data = b"".join(parts)
    return types_pb2.Tensor(dtype=types_pb2.DATA_TYPE_INT32, shape=[len(data) // 4], data=data)


def _dense(tensor: tinker_pb2.TinkerTensor, where: str, left: int) -> types_pb2.Tensor:
    """The tensor with every element spelled out. Without a shape it is one-dimensional."""
    refuse_unknown(tensor, where)
    dtype = _NUMPY.get(tensor.dtype)
    if dtype is None:
        raise InvalidRequest(f"{where}: dtype is not set; send float32 or int64")
    if tensor.WhichOneof("layout") == "sparse_csr":
        data, shape = _densify(tensor, dtype, where, left), list(tensor.shape)
    else:
        data = tensor.dense
        shape = list(tensor.shape) or [len(data) // dtype.itemsize]
    if any(size < 0 for size in shape) or math.prod(shape) * dtype.itemsize != len(data):
        raise InvalidRequest(f"{where}: {len(data)} bytes of data do not match shape {shape} of {dtype.name}")
    # The enums are numbered alike on purpose.
    return types_pb2.Tensor(dtype=types_pb2.DataType.ValueType(tensor.dtype), shape=shape, data=data)


def _densify(tensor: tinker_pb2.TinkerTensor, dtype: np.dtype, where: str, left: int) -> bytes:
    """A CSR matrix as dense bytes; entries that are not listed are 0."""
    shape = list(tensor.shape)
    if len(shape) != 2 or min(shape) < 0:
        raise InvalidRequest(f"{where}: a sparse tensor must have a shape [rows, columns], not {shape}")
    rows, columns = shape
    if rows * columns * dtype.itemsize > left:
        raise _too_large(left)
    csr = tensor.sparse_csr
    values = _vector(csr.values, dtype, f"{where}: values")
    starts = _vector(csr.crow_indices, np.dtype("<i8"), f"{where}: crow_indices")
    places = _vector(csr.col_indices, np.dtype("<i8"), f"{where}: col_indices")
    consistent = (
        len(starts) == rows + 1
        and starts[0] == 0
        and starts[-1] == len(values) == len(places)
        and bool((np.diff(starts) >= 0).all())
        and bool(((places >= 0) & (places < columns)).all())
    )
    if not consistent:
        raise InvalidRequest(f"{where}: the sparse tensor's indices do not fit its shape {shape}")
    dense = np.zeros((rows, columns), dtype)
    dense[np.repeat(np.arange(rows), np.diff(starts)), places] = values
    return dense.tobytes()


def _vector(data: bytes, dtype: np.dtype, where: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise InvalidRequest(f"{where} are {len(data)} bytes, not a multiple of {dtype.itemsize}")
    return np.frombuffer(data, dtype)


def _check_spans(datum: tinker_pb2.TinkerDatum, target: types_pb2.Datum, where: str) -> None:
    """Checks that provenance spans tile what they describe.

    They tell from which sampled sequence a token came. No served loss depends on that
    (stable_reinforce does, and is refused by name), so they have no further effect: the cookbook's
    RL loops send them with every loss.
    """
    spans, loss_spans = datum.model_input_spans, datum.loss_fn_input_spans
    if not spans and not loss_spans:
        return
    tokens = target.tokens.shape[0]
    positions = next((tensor.shape[0] for tensor in target.loss_inputs.values() if tensor.shape), 0)
    for name, given, length in (
        ("model_input_spans", spans, tokens),
        ("loss_fn_input_spans", loss_spans, positions),
    ):
        lengths = [getattr(span, span.WhichOneof("source") or "prompt_tokens").length for span in given]
        if any(span < 0 for span in lengths) or sum(lengths) != length:
            raise InvalidRequest(
                f"{where}.{name} cover {sum(lengths)} positions of {length}; they must cover all"
            )


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the batch needs more than {limit} bytes as dense tensors; send fewer datums at once")
