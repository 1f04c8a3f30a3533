"""Adapters that leave the device for the host while they are idle, and come back.

Invariant: an adapter is on the device of all ranks or of none. Each rank moves what it holds itself: what
computes, its masters, its moments and its gradient. Where a rank has no memory for that, it stays everywhere
where it is, and nothing of it has changed.

Both functions are called on all ranks alike, and agree. They wait for that, for memory, and for copies only
where the host has no page-locked memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from prometheus_client import Counter

from services.common.process import failpoints
from services.common.telemetry.repeats import Repeats
from services.trainer.compute.exchange import any_rank
from services.trainer.compute.memory.failures import free_cache, is_of_device
from services.trainer.compute.memory.host import Away

if TYPE_CHECKING:
    from services.trainer.compute.tenant import LoraTenant

log = logging.getLogger(__name__)

REFUSED = Counter(
    "tinsmith_adapter_moves_refused_total", "Adapters that the first rank had no memory to move"
)

_NO_MEMORY = Repeats(log, "no memory for an adapter that is to move")


def leave(tenant: LoraTenant, device: str) -> bool:
    """Has an adapter whose operations are complete leave the device; whether it did."""
    taken: list[Away] = []
    if not _everywhere(lambda: taken.append(Away(tenant.tensors())), device):
        return False
    (tenant.away,) = taken
    tenant.away.leave()
    return True


def come_back(tenant: LoraTenant, device: str) -> bool:
    """Has an adapter that left come back; whether it did."""
    away = tenant.away
    assert away is not None

    def take() -> None:
        failpoints.hit("trainer.before_return")
        away.take_room()

    if not _everywhere(take, device):
        away.give_room()
        free_cache()
        return False
    away.come_back()
    tenant.away = None
    return True


def _everywhere(take: Callable[[], None], device: str) -> bool:
    """Whether all ranks can take memory. No other rank is waited for in a collective meanwhile.

    Raises:
        RuntimeError: the device failed.
    """
    failed = False
    try:
        take()
    except RuntimeError as error:
        if is_of_device(error):
            raise
        # Neither the host's allocators nor a CPU's have an error of their own.
        REFUSED.inc()
        _NO_MEMORY.failed(device, error)
        failed = True
    (refused,) = any_rank([failed], device)
    return not refused
