"""Which experts have a request's tokens, on the way from the workers to the front end.

`models` says whose can be told; `routed_rows` puts together what workers tell of each step where a request
asks, and `own_rows` sees to it that what vLLM itself tells of all requests is each request's own.

Invariant: what leaves with tokens is what the routers chose when they were computed, without a gap.

Imported by the engine; imports the room worker (what workers are told).
"""
