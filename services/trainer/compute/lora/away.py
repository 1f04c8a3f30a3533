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
from services.trainer.compute.memory.host import Away
from services.trainer.compute.memory.room import taken_everywhere

if TYPE_CHECKING:
    from services.trainer.compute.tenant import LoraTenant

log = logging.getLogger(__name__)

REFUSED = Counter("tinsmith_adapter_moves_refused_total", "Adapters that some rank had no memory to move")

_NO_MEMORY = Repeats(log, "no memory for an adapter that is to move")


def leave(tenant: LoraTenant, device: str) -> bool:
    """Has an adapter whose operations are complete leave the device; whether it did."""
    taken: list[Away] = []
    if not _everywhere(lambda: taken.append(Away(tenant.tensors())), taken.clear, device):
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

    if not _everywhere(take, away.give_room, device):
        return False
    away.come_back()
    tenant.away = None
    return True


def _everywhere(take: Callable[[], None], give_back: Callable[[], None], device: str) -> bool:
    """As `taken_everywhere`; that it is not is counted and said."""
    if taken_everywhere(take, give_back, device):
        return True
    REFUSED.inc()
    _NO_MEMORY.failed(device, "some rank has none where it is to go")
    return False
