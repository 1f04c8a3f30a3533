"""The stores of all records of one Redis.

Invariant: a process has one of these, made where it is put together, so what a store may come to remember it
remembers once.
"""

from __future__ import annotations

from dataclasses import dataclass

import redis.asyncio

from services.common.state.poison import Poison
from services.common.state.room import Room
from services.gateway.records.checkpoint import CheckpointStore
from services.gateway.records.model import ModelStore
from services.gateway.records.sample_journal import SampleJournal
from services.gateway.records.sampling_session import InflightStore, SamplingSessionStore
from services.gateway.records.session import SessionStore
from services.gateway.records.snapshot import SnapshotStore


@dataclass(frozen=True)
class Stores:
    """One store a kind of record.

    Attributes:
        poison: what they met and could not read.
    """

    sessions: SessionStore
    models: ModelStore
    checkpoints: CheckpointStore
    sampling_sessions: SamplingSessionStore
    inflight: InflightStore
    samples: SampleJournal
    snapshots: SnapshotStore
    poison: Poison

    @classmethod
    def over(cls, client: redis.asyncio.Redis, room: Room | None = None) -> Stores:
        """The stores of one Redis."""
        poison = Poison(client)
        return cls(
            SessionStore(client, poison),
            ModelStore(client, poison),
            CheckpointStore(client, poison),
            SamplingSessionStore(client, poison),
            InflightStore(client),
            SampleJournal(client, room=room),
            SnapshotStore(client),
            poison,
        )
