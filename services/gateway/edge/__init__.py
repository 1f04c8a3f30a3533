"""The bytes of a client become calls of the application, and what those come to becomes bytes again.

Invariant: nothing outside this room knows HTTP or the public gRPC, and nothing in it decides what a request
means; each error is mapped to a status in one place per protocol.

Imported by `services.gateway.__main__` only.
"""
