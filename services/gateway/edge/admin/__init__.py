"""The administration over gRPC: AdminService of admin.proto.

Invariant: nobody gets here without role admin (`identity/rights.py`).

Imported by edge/grpc/service, which serves it.
"""
