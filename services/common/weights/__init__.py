"""How weights travel from the trainer to the samplers: one interface, one file per medium.

    base.py   packing, checksum, the WeightGroup interface
    store.py  rendezvous over Redis
    gloo.py   CPU tensors
    nccl.py   CUDA tensors

Invariant: nothing but tensor bytes is on the wire, and a receiver either has exactly the sender's
bytes (by checksum) or an error; every step has a deadline.
"""

from services.common.weights.base import TensorSpec, WeightGroup, crc32, nbytes, pack, unpack
from services.common.weights.membership import join

__all__ = ["TensorSpec", "WeightGroup", "crc32", "join", "nbytes", "pack", "unpack"]
