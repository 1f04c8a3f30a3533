"""What vLLM takes for its own on a GPU that other processes share, corrected.

Invariant: of a GPU that vLLM has to itself it takes what it takes without this.

Imported by the room worker.
"""
