"""The body of POST forward, which SDKs before 0.22 send as JSON, as the message that later ones send instead.

Invariant: what comes out is what a later SDK would have sent for the same call, and has the same bounds.
"""

from __future__ import annotations

from array import array

import numpy as np

from services.common.contract.errors import InvalidRequest
from services.gateway.access.limits import Limits
from services.gateway.edge.http.codec import forward_backward_in, messages
from services.gateway.edge.http.codec.long_lists import LongLists, widened
from tinsmith.internal.v1 import tinker_pb2

_FLOAT, _INT = tinker_pb2.TINKER_DATA_TYPE_FLOAT32, tinker_pb2.TINKER_DATA_TYPE_INT64


def parse_request(data: bytes, limits: Limits) -> tinker_pb2.TinkerForwardBackwardRequest:
    """The request of a body. Proportional to its size: run in a thread.

    Raises:
        InvalidRequest: the body is malformed, or has what is not served.
        TooLarge: it has more parts than the limits allow.
    """
    lists = LongLists(data)
    body = messages.parse(messages.Forward, lists.rest)
    given = body.forward_input
    message = tinker_pb2.TinkerForwardBackwardRequest(
        model_id=body.model_id, seq_id=body.seq_id, loss_fn=given.loss_fn, forward_only=True
    )
    message.loss_fn_config.update(given.loss_fn_config or {})
    for index, datum in enumerate(given.data):
        target = message.data.add()
        for chunk in datum.model_input.chunks:
            if not isinstance(chunk, messages.EncodedTextChunk):
                raise InvalidRequest(f"data[{index}]: only text tokens are served in model_input")
            tokens = lists.take(chunk.tokens)
            if tokens.typecode != "i":
                raise InvalidRequest(
                    f"data[{index}]: a token is outside of any vocabulary", "token_out_of_range"
                )
            target.model_input.add().encoded_text.tokens = tokens.tobytes()
        for name, tensor in datum.loss_fn_inputs.items():
            _fill(target.loss_fn_inputs[name], tensor, lists, f"data[{index}].{name}")
    lists.check_all_taken()
    # Read again, for the bounds of what is sent as a message.
    return forward_backward_in.parse_request(message.SerializeToString(), limits)


def _fill(target: tinker_pb2.TinkerTensor, given: messages.LossInput, lists: LongLists, where: str) -> None:
    target.dtype = _FLOAT if given.dtype == "float32" else _INT
    values = _values(given, lists, where)
    rows, columns = given.sparse_crow_indices, given.sparse_col_indices
    target.shape.extend(given.shape or ())
    if rows is None and columns is None:
        target.dense = values
    elif rows is None or columns is None:
        raise InvalidRequest(
            f"{where}: a sparse tensor needs both sparse_crow_indices and sparse_col_indices"
        )
    else:
        target.sparse_csr.values = values
        target.sparse_csr.crow_indices = widened(lists.take(rows)).tobytes()
        target.sparse_csr.col_indices = widened(lists.take(columns)).tobytes()


def _values(given: messages.LossInput, lists: LongLists, where: str) -> bytes:
    """The numbers of a tensor, of 4 bytes each if they are floats, else of 8."""
    data = given.data
    if isinstance(data, str) or all(isinstance(value, int) for value in data):
        integers = lists.take(data)  # type: ignore[arg-type]
        if given.dtype == "float32":
            return np.asarray(integers).astype("<f4").tobytes()
        return widened(integers).tobytes()
    if given.dtype != "float32":
        raise InvalidRequest(f"{where}: a number is no integer, and its dtype is int64", "wrong_dtype")
    try:
        return array("f", data).tobytes()
    except OverflowError as error:
        raise InvalidRequest(f"{where}: a number is no float", "wrong_dtype") from error
