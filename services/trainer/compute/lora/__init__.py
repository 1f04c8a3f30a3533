"""LoRA adapters of many tenants on one frozen base model.

y += x A^T B^T * (alpha / rank), with A [rank, in] and B [out, rank] float32 masters. A critic's adapter has a
value head beside its matrices: v = w . h, with w [1, hidden] starting at zero and h the last hidden state.

Invariant: no token can reach another model's gradient.

Imported by the rest of compute; imports its plain data.
"""
