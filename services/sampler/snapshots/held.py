"""What a request holds of an engine's snapshots: plain data, which `Snapshots` alone changes.

Invariant: whatever is among its keys stays in memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from services.sampler.engine.snapshot_key import Adapter, SnapshotKey


@dataclass
class Held:
    """What a request holds.

    Attributes:
        adapter: None = the base model, or a full one.
        ticket: of its adapter's slot, or of the full model.
        keys: adapters that it keeps in memory.
    """

    ticket: int = -1
    adapter: Adapter | None = None
    keys: list[SnapshotKey] = field(default_factory=list)
