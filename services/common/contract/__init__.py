"""What all services agree on: ids, errors, roles, and the schemas of tensors, losses and samples.

Invariant: pure; the same values are refused everywhere, in the same words.

Imported by every room of every service; imports none.
"""
