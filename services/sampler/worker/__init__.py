"""What runs inside vLLM's workers, beside and within the engine's steps.

Invariant: a running generation is never given other weights than it began with; what arrives is checked
before it takes effect, and takes effect between two steps.

Imported by the room engine (the plain data of scores, how many slots a head may have); vLLM itself loads the
rest. Imports no room of the sampler.
"""
