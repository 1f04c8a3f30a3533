"""The host's side of copies from and to a device: page-locked, for which nobody waits, or pageable where the
system refuses that.

Invariant: what is refused costs time alone. A copy from or to pageable memory is done when it returns, so
that whoever takes it for one that is under way is right.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import cache

import torch
from prometheus_client import Counter
from torch import Tensor

from services.common.process.process import free_machine_memory

log = logging.getLogger(__name__)

REFUSED = Counter(
    "tinsmith_page_locked_refused_total",
    "Times that the first rank's host refused page-locked memory, so that a copy was waited for",
)

_REFUSALS = {1: "invalid value", 2: "memory allocation", 801: "not supported"}
"""CUDA's errors that are of the request itself; any other one is of what the device did before."""

_FEW = 2**20
"""Bytes that a host always has."""


def is_refusal(error: RuntimeError) -> bool:
    """Whether an allocation of page-locked memory failed because there is none, rather than the device. Torch
    has no type of its own for it, as it has for the device's memory."""
    return isinstance(error, torch.AcceleratorError) and getattr(error, "error_code", None) in _REFUSALS


def _page_locked(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """What torch's allocator has of it, or the system."""
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def room(
    shape: Sequence[int],
    dtype: torch.dtype,
    allocate: Callable[[Sequence[int], torch.dtype], Tensor] = _page_locked,
) -> Tensor:
    """Memory of the host for a copy of a tensor, which `copy` is to make.

    Args:
        allocate: has page-locked memory.

    Raises:
        RuntimeError: the host has no other memory either. The system would find that out only when it is
            written to, and kill a process.
    """
    try:
        return allocate(shape, dtype)
    except RuntimeError as error:
        if not is_refusal(error):
            raise
    # Of what is kept no piece was of this size; the system may make one of them.
    _give_back()
    try:
        return allocate(shape, dtype)
    except RuntimeError as error:
        if not is_refusal(error):
            raise
        REFUSED.inc()
        _say_once(str(error).partition("\n")[0])
    wanted, free = math.prod(shape) * dtype.itemsize, free_machine_memory()
    if wanted > max(_FEW, free):
        raise RuntimeError(f"can't allocate memory: a copy takes {wanted} bytes of the host that has {free}")
    # The system gives it when it is written to; only then the next one finds so much less free.
    return torch.empty(shape, dtype=dtype).zero_()


def copy(target: Tensor, source: Tensor) -> None:
    """Copies between a device and memory that `room` gave; if that is pageable, it is done at once."""
    on_host = target if target.device.type == "cpu" else source
    target.copy_(source, non_blocking=on_host.is_pinned())


def _give_back() -> None:
    """What the allocator keeps for later."""
    if torch.cuda.is_available():
        torch.accelerator.empty_host_cache()


@cache
def _say_once(why: str) -> None:
    log.warning(
        "the host refuses page-locked memory (%s): copies from and to the device then go by other memory, "
        "and are waited for",
        why,
    )
