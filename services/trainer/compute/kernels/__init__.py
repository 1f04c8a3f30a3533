"""What a model computes between its products, in fewer kernels on CUDA than transformers writes it in.

Invariant: a function is replaced only where it was seen, by trying, to compute the same, in this model alone
and on CUDA alone; on a CPU, and of any other model in the process, every number is as it was.

Imported by trainer/compute/base_model.py.
"""
