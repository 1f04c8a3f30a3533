"""Which replicas can run what a sample wants at all: not all run adapters, or fully fine-tuned
models, or tell which experts have its tokens.

Invariant: a sample goes to one that cannot, which says why, only when none that can was there for a while;
one that restarts or drains is waited for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from services.common.state.registry import ServiceRecord
from services.gateway.placement.choose_replica import Wanted

_BACK_S = 600.0
"""A replica that is restarted or replaced is back by then."""


def runs(record: ServiceRecord, wanted: Wanted) -> bool:
    """Whether a replica can run it."""
    if wanted.weights:
        return record.full_models and tells(record, wanted)
    return (record.adapts or not wanted.adapter) and tells(record, wanted)


def tells(record: ServiceRecord, wanted: Wanted) -> bool:
    """Whether a replica has all that its answer is to have."""
    return record.routing is not None or not wanted.routed_experts


class Able:
    """Remembers when there was a replica for each kind of sample of each base model."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, bool, bool, bool], float] = {}

    def among(
        self, base_model: str, ready: Mapping[str, ServiceRecord], wanted: Wanted, now: float
    ) -> list[str]:
        """The replicas to choose from.

        Args:
            ready: by incarnation.
            now: seconds of any clock that does not go back.
        """
        kind = (base_model, bool(wanted.weights), bool(wanted.adapter), wanted.routed_experts)
        able = [name for name, record in ready.items() if runs(record, wanted)]
        if able:
            self._seen[kind] = now
        elif now - self._seen.get(kind, -math.inf) > _BACK_S:
            return list(ready)
        return able
