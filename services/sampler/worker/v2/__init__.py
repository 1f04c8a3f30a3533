"""vLLM's V2 model runner: what Tinsmith has it do otherwise, and how. It takes Triton, which a CPU has not.

Invariant: nothing outside this room knows the internals of that runner. Its random numbers are vLLM's own, of
seed, position and token alone.

Imported by the room worker, for an engine whose workers have that runner.
"""
