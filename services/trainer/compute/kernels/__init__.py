"""What a model computes in a better way than transformers or torch would: on CUDA norms and rotations in few
kernels, on CPUs of some vendors products with frozen weights by the library that knows them.

Invariant: what is replaced is the same function but for rounding, and where it had been written out, that was
seen by trying; in this model alone. On every other device each number is as it was.

Imported by trainer/compute/base_model.py and logprobs.py.
"""
