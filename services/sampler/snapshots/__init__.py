"""Which weights are where: adapters and full models, in memory, in the store and in the engine.

Invariant: while a request runs, the engine has exactly the weights that the request names. What to load,
keep, evict and swap, and whose turn it is, are pure decisions (residency.py, staging.py, turns.py,
adapter_turns.py); the others carry them out.

Imported by the room requests, the service and the wiring; imports the room engine.
"""
