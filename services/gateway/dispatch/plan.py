"""What a dispatcher does next: pure decisions over plain data.

Invariant: operations are sent in seq_id order; one is sent only when every lower seq_id is sent,
used up, or part of the trainer's state; each names its predecessor in the trainer's chain.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum

from services.common.contract import errors
from services.common.contract.errors import (
    Conflict,
    DataLoss,
    DeadlineExceeded,
    Gone,
    InvalidRequest,
    ModelNotResident,
    NotFound,
    Overloaded,
    SnapshotNotFound,
    StaleEpoch,
    StorageAway,
    TinsmithError,
    Unavailable,
)
from services.common.state.journal_records import Entry, InVain, JournalIndex, error_result
from services.common.state.poison import Unreadable
from tinsmith.internal.v1 import operation_pb2
from tinsmith.v1 import results_pb2


@dataclass(frozen=True)
class Position:
    """How far a dispatcher is in a model's journal.

    Attributes:
        cursor: every journaled seq_id up to this one is sent, or needs no sending.
        applied: last operation in the trainer's state when the dispatcher last asked; -1 = none.
        tail: last operation of the trainer's chain: executed, or sent to be.
    """

    cursor: int = -1
    applied: int = -1
    tail: int = -1


@dataclass(frozen=True)
class Window:
    """Bounds of what is under way at once. At most 64 operations: a trainer keeps as many results."""

    operations: int = 32
    bytes: int = 128 << 20


@dataclass(frozen=True)
class Allowance:
    """What a model may send now, for the memory that it takes.

    Attributes:
        nbytes: payload in all.
        one: one operation whatever its size.
    """

    nbytes: int
    one: bool


UNBOUNDED = Allowance(1 << 62, True)


@dataclass(frozen=True)
class DispatchSettings:
    """Times in seconds.

    Attributes:
        execute_timeout: deadline of one Execute call; the same call is made again after it.
        restore_timeout: deadline of one Restore call.
        gap_timeout: how long later operations wait for a missing seq_id.
        gap_patience: how long they do before clients are told. Requests sent at once overtake each other.
        idle_release: how long a lease is kept without work.
        trainer_poll: longest wait before looking for a missing trainer again.
        trainer_patience: how long a model's trainer is waited for when another one is there. Longer than most
            restarts take: a model that moves is loaded from its snapshot and replayed.
    """

    window: Window = field(default_factory=Window)
    execute_timeout: float = 600.0
    restore_timeout: float = 120.0
    gap_timeout: float = 600.0
    gap_patience: float = 5.0
    idle_release: float = 30.0
    trainer_poll: float = 5.0
    trainer_patience: float = 120.0


@dataclass(frozen=True)
class Send:
    """Send one operation. `replayed`: its result is published already."""

    seq_id: int
    after_seq_id: int
    size: int
    replayed: bool


@dataclass(frozen=True)
class Gap:
    """seq_ids `first` .. `last` have not arrived, later ones have."""

    first: int
    last: int


@dataclass(frozen=True)
class Plan:
    """What to send now, and where that leaves the dispatcher. `held_back`: there is no room for the next."""

    sends: tuple[Send, ...]
    position: Position
    gap: Gap | None
    held_back: bool

    @property
    def nbytes(self) -> int:
        """Payload of what is to be sent."""
        return sum(send.size for send in self.sends)


def position_after_restore(applied: int, lowest_pending: int) -> Position:
    """Where to start when the trainer's state holds every operation up to `applied`.

    Operations up to there whose results are not published are sent too: the trainer keeps results.
    """
    cursor = applied if lowest_pending < 0 else min(applied, lowest_pending - 1)
    return Position(cursor=cursor, applied=applied, tail=applied)


def position_at(position: Position, seq_id: int) -> Position:
    """Where to go on when what was sent after an operation is to be sent again."""
    return replace(position, cursor=seq_id, tail=seq_id)


def plan(
    position: Position,
    entries: Iterable[Entry],
    floor: int,
    under_way: int,
    bytes_under_way: int,
    window: Window,
    allowance: Allowance = UNBOUNDED,
) -> Plan:
    """Chooses what to send.

    Args:
        entries: journal entries after `position.cursor`, in order.
        floor: missing seq_ids up to this one are used up, or covered by a durable snapshot.
        under_way: operations sent and not answered; `bytes_under_way`: their payload.
    """
    sends: list[Send] = []
    gap: Gap | None = None
    held_back, room = False, allowance.nbytes
    for entry in entries:
        settled = max(position.cursor, floor, position.applied)
        if entry.seq_id > settled + 1:
            gap = Gap(settled + 1, entry.seq_id - 1)
            break
        executed = entry.seq_id <= position.applied
        if entry.size == 0 or (executed and not entry.pending):
            position = replace(position, cursor=entry.seq_id)
            continue
        if under_way >= window.operations or (under_way and bytes_under_way + entry.size > window.bytes):
            break
        if entry.size > room and not (allowance.one and not sends):
            held_back = True
            break
        room -= entry.size
        after = entry.seq_id - 1 if executed else position.tail
        sends.append(Send(entry.seq_id, after, entry.size, replayed=not entry.pending))
        under_way += 1
        bytes_under_way += entry.size
        position = replace(position, cursor=entry.seq_id, tail=position.tail if executed else entry.seq_id)
    return Plan(tuple(sends), position, gap, held_back)


def starts_at_creation(index: JournalIndex) -> bool:
    """Whether a journal, read from its start, begins with a creation that has no result yet."""
    return can_replay_from_start(index) and index.entries[0].pending


def can_replay_from_start(index: JournalIndex) -> bool:
    """Whether a journal, read from its start, holds everything since the model's creation."""
    return index.durable < 0 and bool(index.entries) and index.entries[0].seq_id == 0


class Action(Enum):
    """What to do about a failed call."""

    RESEND = "resend"
    """The same call again, a little later."""
    SYNCHRONISE = "synchronise"
    """Ask the trainer where the model is, and go on from there."""
    AWAIT_TRAINER = "await trainer"
    """The trainer is gone or going: wait for it, then synchronise."""
    GIVE_UP_LEASE = "give up lease"
    """Another gateway leads this model."""
    FAIL = "fail"
    """It did not run and will not: resolve its future with the error, then synchronise."""
    REPORT_LOST_RESULT = "report lost result"
    """It ran: resolve its future with the error and go on."""


_MOST_CONFLICTS = 3


def after_failure(error: TinsmithError, times: int) -> Action:
    """Chooses what to do about a failed call.

    Args:
        times: how often this operation failed in this way so far, this time included.
    """
    if isinstance(error, StaleEpoch):
        return Action.GIVE_UP_LEASE
    if isinstance(error, ModelNotResident):
        return Action.SYNCHRONISE
    if isinstance(error, Unavailable):
        # Which operation brings a trainer down the trainer itself knows best (common/process/crashes.py).
        return Action.AWAIT_TRAINER
    if isinstance(error, (DeadlineExceeded, Overloaded, StorageAway)):
        return Action.RESEND
    if error.code == "result_lost":
        return Action.REPORT_LOST_RESULT
    if isinstance(error, Conflict) and times < _MOST_CONFLICTS:
        return Action.SYNCHRONISE
    return Action.FAIL


TOOK_EFFECT = frozenset(("non_finite_gradient", "result_lost"))
"""Codes of what failed and yet changed the model, as it does again: a step that dropped the gradient, an
operation that ran and whose result is not known."""
_REFUSALS = (InvalidRequest, NotFound, Gone, DataLoss)
"""What comes again until something changes. The operation took effect before, so that is seldom its own:
files are away with their volume, or the trainer was started with another model or release. A lack of memory,
an outage or a crash is no refusal. A result has the code alone: a checkpoint that is not found is an
InvalidRequest there."""
_NO_SNAPSHOT = (NotFound, SnapshotNotFound, DataLoss)
_SETTINGS = frozenset(("beyond_trainer_memory",))
"""Codes of refusals that another trainer, or other settings of it, would not come to."""
_MOST_UNREADABLE = 3
REFUSED_S = 600.0
"""Pauses until a model is lost that is refused all the time: for whoever brings back what is away."""
IN_VAIN_S = 24 * 3600.0
"""Pauses until a model is lost whose session is over, whatever it waits for."""
LONGEST_PAUSE_S = 300.0
"""Between tries to repeat an operation, each of which reads the model from its snapshot."""
BETWEEN_TRIES_S = 120.0
"""In which a trainer that puts an operation off says so again: a pause of its own, and a try."""
_GIVEN_UP = "crashed_trainer"
"""Code of what brought its trainer down and is not begun for a while (common/process/crashes.py)."""


def replay_passes_over(operation: operation_pb2.Operation, result: results_pb2.OperationResult) -> bool:
    """Whether an operation left the model as it was, so that a replay need not repeat it."""
    if result.WhichOneof("kind") == "error":
        return result.error.code not in TOOK_EFFECT
    kind = operation.WhichOneof("kind")
    if kind == "forward_backward":
        return operation.forward_backward.forward_only
    return kind in ("save_state", "save_for_sampler", "save_external")


def may_be_told_first(operation: operation_pb2.Operation, result: results_pb2.OperationResult) -> bool:
    """Whether a client may have a result before it is written down: of what only ran forward. If the writing
    fails the operation runs again, and whatever becomes of it then, the model is the same. Of a batch that is
    trained on, or a step, a client that was told could be left with a model that lacks it: it may fail the
    next time, as for want of memory, which nobody would know for one that has to be repeated.
    """
    kind = result.WhichOneof("kind")
    return kind == "forward_backward" and operation.forward_backward.forward_only


def is_refused(error: TinsmithError) -> bool:
    """Whether a replay met what comes again until something changes."""
    return isinstance(error, _REFUSALS) and error.code not in _SETTINGS


def ends_model(error: TinsmithError, times: int, waited: InVain, over: bool) -> bool:
    """Whether a model is lost because an operation that had taken effect could not be repeated. Its snapshot
    and journal are whole, so only for what was refused for long, or once nobody can miss the model.

    Args:
        times: how often the operation could not be so far, this time included.
        waited: so far.
        over: its session is.
    """
    if isinstance(error, Unreadable):
        # In Redis, where no volume comes back.
        return times >= _MOST_UNREADABLE
    return (is_refused(error) and waited.refused >= REFUSED_S) or gives_up(waited, over)


def is_snapshot_missing(error: TinsmithError) -> bool:
    """Whether a trainer that answers does not find what a model is to be brought back from, or not whole."""
    return isinstance(error, _NO_SNAPSHOT)


def loses_snapshot(error: TinsmithError, waited: InVain, over: bool) -> bool:
    """Whether a model is lost because a trainer could not bring it back; otherwise as `ends_model`."""
    return (is_snapshot_missing(error) and waited.refused >= REFUSED_S) or gives_up(waited, over)


def gives_up(waited: InVain, over: bool) -> bool:
    """Whether a model is waited for no longer whatever it waits for. `over`: its session is."""
    return over and waited.total >= IN_VAIN_S


def tried_in_vain(error: TinsmithError) -> bool:
    """Whether a trainer tried to bring a model back and could not: one that is away or hangs has not."""
    return not isinstance(error, (Unavailable, DeadlineExceeded))


def cannot_repeat(seq_id: int, error: TinsmithError) -> str:
    """Why a model's operations wait while one that had taken effect cannot be repeated."""
    if error.code == _GIVEN_UP:
        return (
            f"operation {seq_id} cannot be repeated at present: the trainer died of it again and again (its "
            "log says more); it tries once more after an hour, or after it was stopped in order and started"
        )
    return f"operation {seq_id} cannot be repeated at present ({error.message})"


def closing_result(operation: operation_pb2.Operation, result: results_pb2.OperationResult) -> bytes:
    """What all later operations of the model come to because of this one; empty = they run."""
    kind = operation.WhichOneof("kind")
    if kind == "create_model" and result.WhichOneof("kind") == "error":
        reason = InvalidRequest(
            f"model {operation.model_id} was not created: {result.error.message}", "model_not_created"
        )
    elif kind == "unload_model" and result.WhichOneof("kind") != "error":
        reason = InvalidRequest(
            f"model {operation.model_id} was unloaded; create a model from a checkpoint", "model_unloaded"
        )
    else:
        return b""
    return error_result(errors.to_pb(reason))


def missing_reason(base_model: str) -> str:
    """Why a model's operations wait when no trainer is ready: whether one comes back or starts for the first
    time a gateway that was just started cannot tell."""
    return f"no trainer for {base_model} is ready; the request will go on when one is"


def gap_reason(gap: Gap, most: float) -> str:
    """Why a model's operations wait for some that did not come. `most`: seconds that they do."""
    one = gap.first == gap.last
    missing = f"seq_id {gap.first}" if one else f"seq_ids {gap.first} to {gap.last}"
    return (
        f"{missing} did not arrive; what comes after {'it' if one else 'them'} waits for {most:.0f} s at most"
    )


def not_back_reason(error: TinsmithError, missing: str) -> str:
    """Why a model's operations wait while its trainer cannot bring it back. `missing`: why there is none."""
    if not tried_in_vain(error):
        return missing
    return f"the trainer cannot bring the model back at present ({error.message})"


def most_between_restores(error: TinsmithError) -> float:
    """Seconds that pass at most before a trainer is asked again to bring a model back. What it refuses for
    what the snapshot is may cost the reading of it each time, and comes again until somebody changes it."""
    return LONGEST_PAUSE_S if isinstance(error, (InvalidRequest, DataLoss)) else 2.0


def backoff(attempt: int, first: float = 0.05, most: float = 2.0) -> float:
    """Seconds to wait before attempt number `attempt` (1, 2, ...) is repeated."""
    return min(most, first * 2.0 ** min(attempt - 1, 16))
