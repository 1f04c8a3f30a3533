"""The public gRPC services over the application layer.

Invariant: the caller of every method is known before its message is received; errors are typed and mapped to
statuses by `services.common.process.rpc`.
"""

from __future__ import annotations

from typing import Any

from services.common.process import rpc
from services.common.process.serving.server_limits import ServerLimits
from services.common.tls.files import KeyFiles
from services.common.tls.wires import public
from services.gateway.application import Application
from services.gateway.edge.admin.service import AdminService
from services.gateway.edge.books.audit_calls import AuditCalls
from services.gateway.edge.grpc.checkpoints import CheckpointCalls
from services.gateway.edge.grpc.receive import Reception, key_of
from services.gateway.edge.grpc.results import ResultCalls
from services.gateway.edge.grpc.runs import RunCalls
from services.gateway.edge.grpc.sampling import SamplingCalls
from services.gateway.edge.grpc.sessions import SessionCalls
from services.gateway.edge.grpc.training import TrainingCalls
from tinsmith.v1 import admin_pb2, admin_pb2_grpc, service_pb2, service_pb2_grpc


class TinsmithService(
    SessionCalls,
    TrainingCalls,
    SamplingCalls,
    ResultCalls,
    RunCalls,
    CheckpointCalls,
    AuditCalls,
    service_pb2_grpc.TinsmithServiceServicer,
):
    """Methods as service.proto describes them."""


async def serve(
    application: Application,
    bind: str,
    connections: int = 2048,
    tells: bool = False,
    tls: KeyFiles | None = None,
) -> rpc.RpcServer:
    """Serves the public services on "host:port", which other gateways of this machine may share.

    Args:
        connections: at once; further ones are closed.
        tells: whether each call is a line of the access log.
        tls: certificate of the port, read again when it rotates; None: in the clear.

    Raises:
        Unavailable: the address cannot be bound.
    """
    name = service_pb2.DESCRIPTOR.services_by_name["TinsmithService"].full_name
    add = service_pb2_grpc.add_TinsmithServiceServicer_to_server
    most = application.limits.grpc_message_bytes
    reception = Reception(application, [rpc.HEALTH_SERVICE])
    limits = ServerLimits.public(most, connections, application.limits.owners.calls)
    admin = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
    services = [
        (add, TinsmithService(application), name),
        (admin_pb2_grpc.add_AdminServiceServicer_to_server, AdminService(application), admin),
    ]

    def follows(metadata: Any) -> bool:
        return application.keys.knows(key_of(metadata))

    return await rpc.serve(services, bind, True, [reception], limits, tells, public(tls), follows)
