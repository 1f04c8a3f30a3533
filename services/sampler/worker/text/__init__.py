"""Text models of vLLM that are served alone, from files of models that read pictures too.

Invariant: each computes what vLLM's own class does; only the names of its weights in files are told.

Imported by engine/settings and by the room worker.
"""
