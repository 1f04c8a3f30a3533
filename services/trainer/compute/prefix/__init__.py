"""Prefixes that several sequences share: how they lie in a flat batch, and attention over them,
with sinks too.

Invariant: each sequence's numbers and gradient are those of the sequence alone, however it is cut into
pieces.

Imported by the rest of compute; imports order, and of compute exchange, memory and split.
"""
