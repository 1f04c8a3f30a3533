"""The public gRPC service over the application layer.

Invariant: the caller of every method is known before its message is received; errors are typed and mapped to
statuses by `services.common.process.rpc`.
"""

from __future__ import annotations

from services.common.process import rpc
from services.gateway.application import Application
from services.gateway.edge.grpc.checkpoints import CheckpointCalls
from services.gateway.edge.grpc.receive import Reception
from services.gateway.edge.grpc.results import ResultCalls
from services.gateway.edge.grpc.runs import RunCalls
from services.gateway.edge.grpc.sampling import SamplingCalls
from services.gateway.edge.grpc.sessions import SessionCalls
from services.gateway.edge.grpc.training import TrainingCalls
from tinsmith.v1 import service_pb2, service_pb2_grpc


class TinsmithService(
    SessionCalls,
    TrainingCalls,
    SamplingCalls,
    ResultCalls,
    RunCalls,
    CheckpointCalls,
    service_pb2_grpc.TinsmithServiceServicer,
):
    """Methods as service.proto describes them."""


async def serve(application: Application, bind: str, connections: int = 2048) -> rpc.RpcServer:
    """Serves the public service on "host:port", which other gateways of this machine may share.

    Args:
        connections: at once; further ones are closed.

    Raises:
        Unavailable: the address cannot be bound.
    """
    name = service_pb2.DESCRIPTOR.services_by_name["TinsmithService"].full_name
    add = service_pb2_grpc.add_TinsmithServiceServicer_to_server
    most = application.limits.grpc_message_bytes
    reception = Reception(application, [rpc.HEALTH_SERVICE])
    limits = rpc.ServerLimits.public(most, connections)
    return await rpc.serve([(add, TinsmithService(application), name)], bind, True, [reception], limits)
