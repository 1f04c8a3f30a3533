"""How weights travel from the trainer to the samplers: one interface, one file per medium.

    base.py      packing, the WeightGroup interface
    checksums.py what a receiver knows the sender's bytes by, computed where they are
    stream.py    the same bytes in buckets, for what is too large to copy
    side_streams.py streams of a device beside those that compute
    store.py     rendezvous over Redis
    within.py    a deadline for what has none of its own
    gloo.py      host memory
    nccl.py      device memory

Invariant: nothing but tensor bytes is on the wire, and a receiver either has exactly the sender's
bytes (by checksum) or an error; every step has a deadline.

Imported by trainer and sampler, never by the gateway; imports state, process and contract.
"""

from services.common.weights.base import (
    BUCKET_BYTES,
    WeightGroup,
    most_seconds,
    nbytes,
    pack,
    specs_of,
    unpack,
)
from services.common.weights.checksums import checksum
from services.common.weights.membership import join
from services.common.weights.store import NotMet
from services.common.weights.stream import buckets, stream_checksum

__all__ = [
    "BUCKET_BYTES",
    "NotMet",
    "WeightGroup",
    "buckets",
    "checksum",
    "join",
    "most_seconds",
    "nbytes",
    "pack",
    "specs_of",
    "stream_checksum",
    "unpack",
]
