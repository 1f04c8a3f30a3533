"""Experts that a batch is given instead of those that the model's routers would choose.

Invariant: a token that is given none is computed to the bit as without this.

Imported by the rest of compute; imports of compute lora.
"""
