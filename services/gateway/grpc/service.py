"""The public gRPC service over the application layer.

Invariant: every method knows the caller before it does anything; errors are typed and mapped to
statuses by `services.common.rpc`.
"""

from __future__ import annotations

from services.common import rpc
from services.gateway.app import Application
from services.gateway.grpc.budget import BudgetInterceptor
from services.gateway.grpc.checkpoints import CheckpointCalls
from services.gateway.grpc.runs import RunCalls
from services.gateway.grpc.sampling import SamplingCalls
from services.gateway.grpc.sessions import SessionCalls
from services.gateway.grpc.training import TrainingCalls
from tinsmith.v1 import tinsmith_pb2, tinsmith_pb2_grpc


class TinsmithService(
    SessionCalls,
    TrainingCalls,
    SamplingCalls,
    RunCalls,
    CheckpointCalls,
    tinsmith_pb2_grpc.TinsmithServiceServicer,
):
    """Methods as tinsmith.proto describes them."""


async def serve(application: Application, bind: str) -> rpc.RpcServer:
    """Serves the public service on "host:port", which other gateways of this machine may share.

    Raises:
        Unavailable: the address cannot be bound.
    """
    name = tinsmith_pb2.DESCRIPTOR.services_by_name["TinsmithService"].full_name
    add = tinsmith_pb2_grpc.add_TinsmithServiceServicer_to_server
    interceptors = [BudgetInterceptor(application.budget)]
    return await rpc.serve([(add, TinsmithService(application), name)], bind, True, interceptors)
