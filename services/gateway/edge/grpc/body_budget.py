"""The byte budget of the gRPC edge.

Invariant: a message is parsed only after its bytes were taken from the gateway's budget, and they are given
back when its call ends. (gRPC itself has read them by then; it takes no message above its own limit.) No
method sees a message with fields that are not in the contract.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from services.common.contract.errors import InvalidRequest
from services.gateway.access.body_budget import BodyBudget
from services.gateway.edge.unknown_fields import refuse_unknown


class BudgetInterceptor(grpc.aio.ServerInterceptor):
    """Counts the requests of unary calls. Raises Overloaded inside the call when the budget is used up."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None or handler.unary_unary is None or handler.request_deserializer is None:
            return handler
        inner, parse, budget = handler.unary_unary, handler.request_deserializer, self._budget

        async def counted(raw: bytes, context: grpc.aio.ServicerContext) -> Any:
            budget.take(len(raw))
            try:
                return await inner(_parsed(parse, raw), context)
            finally:
                budget.give_back(len(raw))

        return grpc.unary_unary_rpc_method_handler(
            counted,
            request_deserializer=lambda raw: raw,
            response_serializer=handler.response_serializer,
        )


def _parsed(parse: Callable[[bytes], Any], raw: bytes) -> Any:
    try:
        message = parse(raw)
    except DecodeError as error:
        raise InvalidRequest(f"the message cannot be read: {error}", "bad_body") from error
    refuse_unknown(message, "the request")
    return message
