"""Calls of our methods on vLLM's workers, the jobs that run there, and how these tell that they are done; and
sequences that vLLM is asked for.

Invariants: nothing here asks a worker whether it is done: between its start and its end a job costs the
engine's steps nothing. What a worker keeps for nobody any more is freed, however often a call fails,
and so is what a sequence has in the engine.

Imported by the engine; imports the room worker (the format of reports).
"""
