"""What vLLM's engine is started with: `arguments` chooses it, from what `models` reads of the model and
`cpu_cache` finds room for, and `checks` refuses what vLLM does not run.

Invariant: what is left to itself is what vLLM takes on the device, but for what decides the answers.

Imported by the engine; imports the room worker (what vLLM is told of it).
"""
