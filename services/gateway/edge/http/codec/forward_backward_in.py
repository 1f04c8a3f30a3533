"""The SDK's forward_backward message, translated to the operation that the journal holds.

Invariant: what comes out is dense: one int32 token tensor per datum and dense loss inputs. What a sparse
tensor becomes is known, and fits its datum, before it is allocated. Whatever is not served raises a sentence.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from services.common.contract import loss_schema, stand_ins, tensors
from services.common.contract.errors import InvalidRequest, TooLarge
from services.gateway.access.limits import Limits
from services.gateway.edge import wire_check
from tinsmith.internal.v1 import tinker_pb2
from tinsmith.v1 import training_pb2, types_pb2

_NUMPY: dict[int, np.dtype] = {
    tinker_pb2.TINKER_DATA_TYPE_FLOAT32: np.dtype("<f4"),
    tinker_pb2.TINKER_DATA_TYPE_INT64: np.dtype("<i8"),
    tinker_pb2.TINKER_DATA_TYPE_INT32: np.dtype("<i4"),
    # Only moved, never computed with.
    tinker_pb2.TINKER_DATA_TYPE_BFLOAT16: np.dtype("<u2"),
}
_UNSERVED_CHUNKS = {"image": "images", "dmel": "audio"}


def check_beginning(data: bytes, limits: Limits) -> None:
    """Looks at the first bytes of a body, so that one of countless empty datums is not unpacked any further.

    Raises:
        InvalidRequest, TooLarge: the whole of it cannot be read.
    """
    wire_check.check(tinker_pb2.TinkerForwardBackwardRequest.DESCRIPTOR, data, limits, whole=False)


def parse_request(body: bytes, limits: Limits) -> tinker_pb2.TinkerForwardBackwardRequest:
    """The body of POST forward_backward.

    Raises:
        InvalidRequest: the bytes are no such message, or one with fields that this service does not know.
        TooLarge: it has more parts than the limits allow.
    """
    return wire_check.parsed(tinker_pb2.TinkerForwardBackwardRequest, body, limits)


def sparse_bytes(message: tinker_pb2.TinkerForwardBackwardRequest, limits: Limits) -> int:
    """Bytes of the request's sparse tensors once they are dense.

    Raises:
        InvalidRequest: one is no matrix with a row for each token of its datum.
        TooLarge: they come to more than a body may have.
    """
    total = 0
    for index, datum in enumerate(message.data):
        tokens: int | None = None
        for name, tensor in datum.loss_fn_inputs.items():
            if tensor.WhichOneof("layout") == "sparse_csr":
                if tokens is None:
                    tokens = sum(len(chunk.encoded_text.tokens) // 4 for chunk in datum.model_input)
                where = f"data[{index}].{name}"
                rows, columns = _sparse_shape(tensor, where)
                if rows != tokens:
                    raise InvalidRequest(
                        f"{where} has {rows} rows but model_input has {tokens} tokens; they must be equal",
                        "length_mismatch",
                    )
                total += rows * columns * _dtype(tensor, where).itemsize
                if total > limits.inflated_body_bytes:
                    raise TooLarge(
                        f"the batch has sparse tensors of more than {limits.inflated_body_bytes} bytes when "
                        "dense; send fewer datums at once"
                    )
    return total


def forward_backward(
    message: tinker_pb2.TinkerForwardBackwardRequest, vocab_size: int, stand_in: str = ""
) -> training_pb2.ForwardBackward:
    """The operation that a request asks for. Proportional to the data, and to its `sparse_bytes`: run in a
    thread.

    Args:
        vocab_size: no position has more targets.
        stand_in: the loss that runs where stable_reinforce is asked for; empty: that is refused.

    Raises:
        InvalidRequest: a tensor is malformed, or something is asked for that is not served.
    """
    operation = training_pb2.ForwardBackward(loss_fn=message.loss_fn, forward_only=message.forward_only)
    operation.loss_config.update(_loss_config(message, stand_in))
    for index, datum in enumerate(message.data):
        where = f"data[{index}]"
        target = operation.data.add()
        target.tokens.CopyFrom(_tokens(datum.model_input, where))
        for name, tensor in datum.loss_fn_inputs.items():
            target.loss_inputs[name].CopyFrom(_dense(tensor, f"{where}.{name}", vocab_size))
        _check_spans(datum, target, where)
    return operation


def _loss_config(message: tinker_pb2.TinkerForwardBackwardRequest, stand_in: str) -> dict[str, float]:
    if not message.loss_fn_config_v2:
        return dict(message.loss_fn_config)
    config = {}
    for name, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            # A loss that takes text is none that is served.
            loss_schema.check_served(stand_ins.that_runs(message.loss_fn, stand_in))
            raise InvalidRequest(
                f"loss_fn_config {name[:100]!r} must be a number; no served loss takes text",
                "wrong_loss_config",
            )
        config[name] = value.number
    return config


def _tokens(chunks: Iterable[tinker_pb2.TinkerChunk], where: str) -> types_pb2.Tensor:
    """All text chunks of a model input as one int32 tensor."""
    parts = []
    for chunk in chunks:
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


def _dtype(tensor: tinker_pb2.TinkerTensor, where: str) -> np.dtype:
    dtype = _NUMPY.get(tensor.dtype)
    if dtype is None:
        raise InvalidRequest(f"{where}: dtype is not set; send float32 or int64")
    return dtype


def _dense(tensor: tinker_pb2.TinkerTensor, where: str, vocab_size: int) -> types_pb2.Tensor:
    """The tensor with every element spelled out. Without a shape it is one-dimensional."""
    dtype = _dtype(tensor, where)
    if tensor.WhichOneof("layout") == "sparse_csr":
        rows, columns = _sparse_shape(tensor, where)
        loss_schema.check_columns(columns, vocab_size, where)
        shape: tuple[int, ...] = (rows, columns)
        data = _densify(tensor.sparse_csr, rows, columns, dtype, where)
    else:
        data = tensor.dense
        tensors.element_count(tensor.shape, where)
        shape = tuple(tensor.shape) or (len(data) // dtype.itemsize,)
        if tensors.element_count(shape, where) * dtype.itemsize != len(data):
            raise InvalidRequest(
                f"{where}: {len(data)} bytes of data do not match shape {list(shape)} of {dtype.name}"
            )
    # The enums are numbered alike on purpose.
    return types_pb2.Tensor(dtype=types_pb2.DataType.ValueType(tensor.dtype), shape=shape, data=data)


def _sparse_shape(tensor: tinker_pb2.TinkerTensor, where: str) -> tuple[int, int]:
    tensors.element_count(tensor.shape, where)
    if len(tensor.shape) != 2:
        raise InvalidRequest(
            f"{where}: a sparse tensor must have a shape [rows, columns], not {list(tensor.shape)}"
        )
    return tensor.shape[0], tensor.shape[1]


def _densify(csr: tinker_pb2.TinkerSparseCsr, rows: int, columns: int, dtype: np.dtype, where: str) -> bytes:
    """A CSR matrix as dense bytes; entries that are not listed are 0."""
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
        raise InvalidRequest(f"{where}: the sparse tensor's indices do not fit its shape [{rows}, {columns}]")
    dense = np.zeros((rows, columns), dtype)
    dense[np.repeat(np.arange(rows), np.diff(starts)), places] = values
    return dense.tobytes()


def _vector(data: bytes, dtype: np.dtype, where: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise InvalidRequest(f"{where} are {len(data)} bytes, not a multiple of {dtype.itemsize}")
    return np.frombuffer(data, dtype)


def _check_spans(datum: tinker_pb2.TinkerDatum, target: training_pb2.Datum, where: str) -> None:
    """Checks that provenance spans tile what they describe.

    They tell from which sampled sequence a token came. No served loss depends on that, nor does one that
    runs in place of stable_reinforce, so they have no further effect: the cookbook's RL loops send them with
    every loss.
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
