"""Weights to samplers.

Invariant: a sampler has exactly the bytes of a version, or an error.

Imported by execution and the server; imports files, world and compute.
"""
