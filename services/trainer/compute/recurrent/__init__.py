"""Layers that carry a state from token to token, over a flat batch: each sequence begins anew, or where what
it shares with others ends.

Invariant: a layer that is not known to keep to sequences so is left to the library, one sequence at a time.

Imported by trainer/compute/attention.py, base_model.py and memory/; imports order, kernels, and
of compute memory's transfers, prefix' layouts and split.
"""
