"""What a base model is tried with before anything depends on it.

Invariant: all ranks take part, and come to the same answer.

Imported by the rest of compute; imports of compute attention, exchange, logprobs, prefix, sharding
and split.
"""
