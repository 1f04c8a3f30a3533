"""Requests of the public gRPC service, translated to the application layer's terms."""

from __future__ import annotations

from services.common.errors import InvalidRequest
from services.gateway.catalog import BaseModel
from services.gateway.futures import FutureView
from services.gateway.sessions import NewSession
from tinsmith.v1 import operation_pb2, tinsmith_pb2, types_pb2

_MAX_ORDINAL = 999_999_999


def new_session(request: tinsmith_pb2.CreateSessionRequest) -> NewSession:
    return NewSession(tags=list(request.tags), user_metadata=dict(request.user_metadata))


def ordinal(name: str, value: int) -> int:
    """A number that becomes part of an object's id.

    Raises:
        InvalidRequest: it is negative or has more than nine digits.
    """
    if not 0 <= value <= _MAX_ORDINAL:
        raise InvalidRequest(f"{name} must be 0 to {_MAX_ORDINAL}, not {value}")
    return value


def forward_backward(request: tinsmith_pb2.ForwardBackwardRequest) -> operation_pb2.ForwardBackward:
    """The operation of a request.

    Raises:
        InvalidRequest: it is not set.
    """
    if not request.HasField("forward_backward"):
        raise InvalidRequest("forward_backward is not set")
    return request.forward_backward


def adam(request: tinsmith_pb2.OptimStepRequest) -> types_pb2.AdamParams:
    """The parameters of a step.

    Raises:
        InvalidRequest: they are not set.
    """
    if not request.HasField("adam"):
        raise InvalidRequest("adam is not set; every field of AdamParams must be given")
    return request.adam


def base_model(model: BaseModel) -> tinsmith_pb2.BaseModel:
    return tinsmith_pb2.BaseModel(
        name=model.name,
        max_context_length=model.context_length,
        trainable=model.trainable,
        sampleable=model.sampleable,
    )


def result(view: FutureView) -> tinsmith_pb2.GetResultResponse:
    """The response for a future; without a result while it is pending."""
    response = tinsmith_pb2.GetResultResponse()
    if view.result is not None:
        response.result.ParseFromString(view.result)
    return response
