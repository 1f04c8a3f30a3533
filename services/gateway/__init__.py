"""The gateway: HTTP and gRPC edges over one application layer, and the dispatchers behind it.

Invariant: a gateway holds no state of its own. Sessions, models, futures and journals are in
Redis, so any gateway answers any request and any gateway may be killed. It imports no torch.
"""
