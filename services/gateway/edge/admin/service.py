"""The service of admin.proto, put together."""

from __future__ import annotations

from services.gateway.edge.admin.cluster import ClusterCalls
from services.gateway.edge.admin.keys import KeyCalls
from tinsmith.v1 import admin_pb2_grpc


class AdminService(KeyCalls, ClusterCalls, admin_pb2_grpc.AdminServiceServicer):
    """Methods as admin.proto describes them."""
