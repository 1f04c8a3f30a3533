"""What the journal is asked and answers. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from services.common.contract import errors
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


@dataclass(frozen=True)
class Accepted:
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
