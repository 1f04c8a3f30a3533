"""The byte budget of the gRPC edge.

Invariant: a message is parsed only after its bytes were taken from the gateway's budget, and they are given
back when its call ends. (gRPC itself has read them by then; it takes no message above its own limit.) It is
looked at before (`wire_check`), so no method sees fields that are not in the contract.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from services.gateway.access.body_budget import BodyBudget
from services.gateway.access.limits import THREAD_ABOVE_BYTES, Limits
from services.gateway.edge import wire_check


class BudgetInterceptor(grpc.aio.ServerInterceptor):
    """Counts the requests of unary calls. Raises Overloaded inside the call when the budget is used up."""

    def __init__(self, budget: BodyBudget, limits: Limits) -> None:
        self._budget = budget
        self._limits = limits

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None or handler.unary_unary is None or handler.request_deserializer is None:
            return handler
        inner, budget = handler.unary_unary, self._budget
        # The generated code deserializes with `FromString` of the request's class.
        kind = handler.request_deserializer.__self__

        async def counted(raw: bytes, context: grpc.aio.ServicerContext) -> Any:
            budget.take(len(raw))
            try:
                return await inner(await self._parsed(kind, raw), context)
            finally:
                budget.give_back(len(raw))

        return grpc.unary_unary_rpc_method_handler(
            counted,
            request_deserializer=lambda raw: raw,
            response_serializer=handler.response_serializer,
        )

    async def _parsed(self, kind: type[Message], raw: bytes) -> Message:
        if len(raw) > THREAD_ABOVE_BYTES:
            return await asyncio.to_thread(wire_check.parsed, kind, raw, self._limits)
        return wire_check.parsed(kind, raw, self._limits)
