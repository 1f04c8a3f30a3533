"""How much of a GPU's memory vLLM counts as taken when it decides how many keys and values fit its share.

vLLM counts by how much less of the whole GPU is free than before it loaded the model. A trainer that works on
the same GPU takes memory meanwhile, or frees some, and all of that counts as vLLM's: a sampler that comes
back beside it would have fewer keys and values than its share has room for, perhaps none, or more, which the
trainer then lacks of its own share (vllm-project/vllm#18854 and #55827; #56830 of memory that is freed).

Invariant: what counts is never less than what torch has taken in this process, and never more than that and
what CUDA may take beside it.
"""

from __future__ import annotations

import logging
from typing import Any

from vllm.v1.worker import gpu_worker

log = logging.getLogger(__name__)

BESIDE_BYTES = 2 << 30
"""More than CUDA takes for kernels and handles while a model is loaded and run once. What NCCL takes is there
before."""

_REPLACED = "maybe_rocm_profiling_fallback"
"""Where vLLM lets another number stand for the measured one; by itself on AMD's GPUs alone."""


def taken(measured: int, by_torch: int) -> int:
    """Bytes that this process has taken.

    Args:
        measured: what the whole GPU has less free.
        by_torch: of this process.
    """
    return min(max(measured, by_torch), by_torch + BESIDE_BYTES)


def correct() -> None:
    """Has the workers of this process count so.

    Raises:
        RuntimeError: vLLM measures in another way.
    """
    if not hasattr(gpu_worker, _REPLACED):
        raise RuntimeError(f"this vLLM measures a GPU's memory in another way; check {__name__}")
    setattr(gpu_worker, _REPLACED, _taken)


def _taken(profile: Any) -> int:
    by_torch = profile.after_profile.torch_memory - profile.before_create.torch_memory
    counts = taken(profile.total_consumed, by_torch)
    if counts != profile.total_consumed:
        log.warning(
            "other processes took or freed memory of this GPU while the engine started: of %.1f GiB less "
            "that are free it counts %.1f as its own",
            profile.total_consumed / 2**30,
            counts / 2**30,
        )
    return counts
