"""One operation, from its admission to its result; and which models are in memory.

Invariant: a model's operations take effect in their order, each once, under the newest epoch only.

Imported by the service and the server; imports all other rooms.
"""
