"""A backend of Triton named "cpu", for vLLM, which leaves Triton alone on a CPU that has none.

Nothing is compiled: with TRITON_INTERPRET=1 Triton itself runs every kernel on numpy arrays, and asks its
backend for nothing. `triton_on_cpu-0.dist-info` beside this package announces it, so it is there in every
process whose PYTHONPATH has this directory.
"""
