"""What a model computes in a better way than transformers would: on CUDA norms and rotations in few kernels.

Invariant: what is replaced is the same function but for rounding, which was seen by trying; in this model
alone. On every other device each number is as it was.

Imported by trainer/compute/base_model.py and recurrent/.
"""
