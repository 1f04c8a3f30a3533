"""The health of a gRPC server, as grpc.health.v1 tells it.

Invariant: who watches waits for nobody but its own client. (In grpc_health's servicer a watch that its client
does not read holds the lock of all others, and of who changes a status.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc


class Health(health_pb2_grpc.HealthServicer):
    """Tells whether services are served."""

    def __init__(self) -> None:
        self._statuses: dict[str, health_pb2.HealthCheckResponse.ServingStatus.ValueType] = {}
        self._changed = asyncio.Event()

    def tell(
        self, services: Iterable[str], status: health_pb2.HealthCheckResponse.ServingStatus.ValueType
    ) -> None:
        """From now on these services have this status; "" is the server."""
        self._statuses.update(dict.fromkeys(services, status))
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        """The status, and each one that it changes to; of several at once the last."""
        told = None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
            if status != told:
                told = status
                await context.write(health_pb2.HealthCheckResponse(status=status))
            else:
                await changed.wait()
