"""What a gRPC server is made of besides its services: its limits, its health, the details of its errors.

Invariant: these say what holds, and `rpc` alone puts a server together.

Imported by rpc, and by whoever says a server's limits; imports contract.
"""
