"""A sequence that is longer than one rank holds, computed by all ranks: who has which part of it, and what
they exchange for attention.

Invariant: the sequence's numbers and gradient are those of one rank alone, but for rounding.

Imported by the rest of compute; imports nothing of the trainer.
"""
