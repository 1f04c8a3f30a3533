"""What was done and used, over both protocols.

Invariant: a caller sees what is of its owner, and role admin what is of everybody.

Imported by edge/grpc/service and edge/http/server, which serve it.
"""
