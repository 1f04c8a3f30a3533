"""What the journal is asked and answers. Plain data."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import IntEnum

import msgspec

from services.common.contract import errors
from services.common.contract.errors import Conflict, InvalidRequest, LimitReached
from services.common.state import keys
from services.common.state.room import Room
from tinsmith.v1 import results_pb2


@dataclass(frozen=True)
class JournalLimits:
    """Bounds of one model's journal.

    Attributes:
        pending_bytes: payload of operations whose results are not published.
        journal_bytes: payload of all operations kept for a replay.
        entries: operations that wait, and operations kept for a replay.
        ahead: how far a seq_id may be beyond the highest one so far.
    """

    pending_bytes: int = 1 << 30
    journal_bytes: int = 4 << 30
    entries: int = 65_536
    ahead: int = 16_384


class Accepted(msgspec.Struct, frozen=True):
    """An acknowledged operation or sample.

    Attributes:
        to_run: it was journaled just now and waits to be run; not so what was accepted before, is refused,
            or comes too late for its model.
    """

    request_id: str
    to_run: bool


@dataclass(frozen=True)
class Entry:
    """One journaled seq_id. `size` is its payload's bytes; 0 = used up, nothing is to run."""

    seq_id: int
    size: int
    pending: bool


@dataclass(frozen=True)
class JournalIndex:
    """A model's journal without its payloads.

    Attributes:
        durable: seq_id of the newest durable snapshot; -1 = none.
        floor: every seq_id up to this one that is not journaled is used up; -1 = none.
        closed: serialized OperationResult that every operation gets because the model can run none;
            empty = the model is open.
        base_model: name of the base model; empty when the creation is not accepted yet.
        trainer: id of the trainer that the model is on; empty = none yet.
        moved: fencing epoch of its last move from one trainer to another; 0 = it never moved.
        pending: operations without a result.
        lowest_pending: lowest seq_id of those; -1 = none.
        entries: after the asked-for seq_id, in order, perhaps not all.
    """

    durable: int
    floor: int
    closed: bytes
    base_model: str
    trainer: str
    moved: int
    pending: int
    lowest_pending: int
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class InVain:
    """How long a model was tried in vain to bring where its journal is, over all gateways. Seconds, of pauses
    between tries: time in which nobody tried does not count.

    Attributes:
        total: since the last result of it.
        refused: of that, since it last failed otherwise than by a refusal.
    """

    total: float
    refused: float


class Closing(IntEnum):
    """What became of an attempt to close a model."""

    STALE_EPOCH = -1
    HAS_WORK = 0
    CLOSED = 1


class Published(IntEnum):
    """What became of a result."""

    STALE_EPOCH = -1
    NOT_PENDING = 0
    PUBLISHED = 1


def error_result(error: errors.types_pb2.Error) -> bytes:
    """A failure as the bytes of an OperationResult."""
    return results_pb2.OperationResult(error=error).SerializeToString()


USE_LIFE_S = 35 * 24 * 3600
"""So long it is kept what was used on a day."""
TRAINED, PREFILLED, CACHED, SAMPLED = "trained", "prefilled", "cached", "sampled"
"""Tokens of data, of prompts that were computed and that came from a cache, and generated ones."""
SAVED, SAVED_BYTES = "saved", "saved_bytes"
"""Named checkpoints, and their bytes."""
STORED = "stored"
"""Bytes of checkpoints in an hour, which stands in the place of the base model."""


class Use(msgspec.Struct, frozen=True):
    """What one result took.

    Attributes:
        owner: empty: nobody who is known, and nothing is counted.
        session: that asked for it.
        run: the model whose weights it was about; empty: a base model's own.
        base_model: of a sample; of an operation its model's journal knows it.
        amounts: by kind.
    """

    owner: str = ""
    session: str = ""
    run: str = ""
    base_model: str = ""
    amounts: Mapping[str, int] = msgspec.field(default_factory=dict)

    @property
    def day_key(self) -> str:
        """Where it is counted today."""
        return keys.used(self.owner, datetime.fromtimestamp(time.time(), UTC).date().isoformat())

    @property
    def args(self) -> list[str | int]:
        """How long it is kept, session, run, kinds and amounts, as `lua/use.lua` takes them."""
        counted = self.amounts.items() if self.owner else ()
        return [
            USE_LIFE_S,
            self.session,
            self.run,
            *(part for pair in counted if pair[1] > 0 for part in pair),
        ]


NOTHING_USED = Use()


def check_accepted(outcome: bytes, model_id: str, seq_id: int, limits: JournalLimits, room: Room) -> None:
    """Raises why an operation was not accepted, if it was not: `lua/accept.lua` says how it went."""
    if outcome == b"conflict":
        raise Conflict(f"seq_id {seq_id} of model {model_id} was used for another request; use the next one")
    if outcome == b"ahead":
        raise InvalidRequest(
            f"seq_id {seq_id} is more than {limits.ahead} ahead of the requests so far; "
            "number requests 1, 2, 3 ... without gaps",
            field="seq_id",
        )
    if outcome == b"busy":
        raise LimitReached(
            f"with this, more than {limits.pending_bytes} bytes (--pending-bytes) of model "
            f"{model_id} would wait to run; send this again later",
            about={"limit": "--pending-bytes"},
        )
    if outcome == b"many":
        raise LimitReached(
            f"{limits.entries} operations (--pending-operations) of model {model_id} wait to run; "
            "send this again later",
            about={"limit": "--pending-operations"},
        )
    if outcome == b"waiting":
        raise LimitReached(
            f"this API key has {room.limits.owner_operations} operations that wait to run over all "
            "its models, and may have no more (--owner-operations); send this again later",
            about={"limit": "--owner-operations"},
        )
    if outcome == b"held":
        raise room.refusal()
    if outcome == b"full":
        raise LimitReached(
            f"with this, model {model_id} would have more than {limits.journal_bytes} bytes "
            "(--journal-bytes) of batches since its last step; send an optim_step, then this",
            about={"limit": "--journal-bytes"},
        )
    if outcome == b"batches":
        raise LimitReached(
            f"model {model_id} has {limits.entries} operations (--pending-operations) that wait or "
            "came since its last step; send an optim_step, then this",
            about={"limit": "--pending-operations"},
        )
