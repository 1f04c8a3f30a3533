"""A model's blocks and what they keep for the backward pass: `checkpointing` has them compute it again, and
`kept` chooses those that need not.

Invariant: which blocks compute again changes no number.

Imported by the rest of compute; imports of compute memory.
"""
