"""vLLM's V1 model runner: what Tinsmith has it do otherwise, and how.

Invariant: nothing outside this room knows the internals of that runner.

Imported by the room worker, for an engine whose workers have that runner.
"""
