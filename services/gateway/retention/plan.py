"""What becomes of sessions that nobody hears of, and of models that are over: pure decisions.

Invariant: nothing is given up that an accepted operation still needs, and nothing is deleted before the
record says that the model is closed, which it stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True)
class RetentionSettings:
    """Times in seconds.

    Attributes:
        park_after: silence after which a session's models leave the trainer's memory. The next request
            brings them back.
        end_after: silence after which a session is over; its checkpoints stay.
        forget_after: time after the end of a session for which its records stay; those of models that have
            checkpoints stay longer.
        record_settles: by then Redis has on disk what was recorded, so that files may be deleted for it.
        snapshot_grace: how long the unnamed sampler snapshots of a session that is over stay, for samples
            that still run.
        sweep: between two looks.
    """

    park_after: float = 1800.0
    end_after: float = 7 * 24 * 3600.0
    forget_after: float = 30 * 24 * 3600.0
    record_settles: float = 5.0
    snapshot_grace: float = 600.0
    sweep: float = 5.0


class SessionStep(Enum):
    """What to do with a session that is not over."""

    KEEP = "keep"
    PARK = "park"
    """Free the memory that its models hold."""
    END = "end"


def session_step(
    last_seen: float, parked_at: float | None, now: float, settings: RetentionSettings
) -> SessionStep:
    """Chooses what to do with a session.

    Args:
        last_seen: time of its last sign of life.
        parked_at: its last sign of life when its models were parked; None = they never were.
    """
    silent = now - last_seen
    if silent >= settings.end_after:
        return SessionStep.END
    if silent >= settings.park_after and parked_at != last_seen:
        return SessionStep.PARK
    return SessionStep.KEEP


@dataclass(frozen=True)
class Rest:
    """Something that could not be done `times` times, and is not tried before `until`."""

    times: int
    until: float


def longer(rest: Rest | None, now: float, first: float, most: float) -> Rest:
    """The rest after one more time: none after the first, twice as long each time from then on."""
    if rest is None:
        return Rest(1, now)
    return Rest(rest.times + 1, now + min(most, first * 2.0 ** min(rest.times, 16)))


@dataclass(frozen=True)
class EndedModel:
    """A model on the list of those to be taken down.

    Attributes:
        noted_at: when it was put on the list, or closed while it was there.
        session_over: nobody can use the session any more.
        closed: no operation will run any more.
        pending: operations without a result.
        erased: nothing is left of its journal, so nothing of its durable state either.
    """

    noted_at: float
    session_over: bool
    closed: bool
    pending: int
    erased: bool


class ModelStep(Enum):
    """What to do next about a model that is to be taken down."""

    WAIT = "wait"
    CLOSE = "close"
    """Nothing waits: have every later operation fail."""
    DELETE_STATE = "delete state"
    """Its memory, its durable training state, then its journal."""
    DELETE_SNAPSHOTS = "delete snapshots"
    """The sampler snapshots that no checkpoint names; then it is off the list."""
    DROP = "drop"
    """Off the list: there is nothing (more) to do until its session is over."""


def model_step(model: EndedModel, now: float, settings: RetentionSettings) -> ModelStep:
    """Chooses the next step of taking a model down."""
    if model.pending:
        return ModelStep.WAIT
    if not model.closed:
        return ModelStep.CLOSE if model.session_over else ModelStep.DROP
    if not model.erased:
        settled = now - model.noted_at >= settings.record_settles
        return ModelStep.DELETE_STATE if settled else ModelStep.WAIT
    if not model.session_over:
        return ModelStep.DROP
    return ModelStep.DELETE_SNAPSHOTS if now - model.noted_at >= settings.snapshot_grace else ModelStep.WAIT
