"""Whether another try of a sample may do better, which replicas are better left alone for a while, and what
is told of samples that wait for Redis.

Invariants: a sample is tried again only after what another replica, or another moment, may do better, and not
for ever; a replica that fails by a fault of its own rests longer each time, until it answers.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from prometheus_client import Counter

from services.common.contract.errors import (
    DeadlineExceeded,
    Draining,
    Internal,
    Overloaded,
    SnapshotNotFound,
    TinsmithError,
    Unavailable,
)
from services.common.state.registry import ServiceRecord
from services.common.telemetry.repeats import Repeats
from services.gateway.dispatch.plan import backoff

log = logging.getLogger(__name__)

WAITS = Counter(
    "tinsmith_sample_redis_failures_total",
    "Times that a sample waited as Redis did not answer",
    ["what"],
)
_LOST = Repeats(log, "a sampler lost samples, which run again")

_MOST_LOST = 5
_MOST_FAILURES = 2
_FIRST_REST_S, _MOST_REST_S = 1.0, 60.0
_FULL_S = 0.5
_SILENT_S = 0.2


class Stalled(DeadlineExceeded):
    """A sample that makes no progress. Another try would take as long."""


@dataclass
class Tries:
    """The tries of one sample: in all, whether any replica was sent it, lost with which replicas, and failed;
    and the replica that has it from another gateway, until it was asked for it."""

    number: int = 0
    sent: bool = False
    lost: set[str] = field(default_factory=set)
    failures: int = 0
    has_it: ServiceRecord | None = None

    def note(self, error: TinsmithError, replica: ServiceRecord) -> None:
        """One that a replica answered with an error.

        Raises:
            TinsmithError: that it fails with; no other try would do better.
        """
        self.number += 1
        if isinstance(error, Unavailable):
            if not isinstance(error, Draining):
                self.lost.add(replica.incarnation)
            if len(self.lost) >= _MOST_LOST:
                many = len(self.lost)
                raise Internal(f"{many} samplers stopped while they ran this sample") from error
            _LOST.failed(f"{replica.id}, started as {replica.incarnation[:8]}", error)
            return
        self.failures += 1
        hopeless = error.category == "user" or isinstance(error, Stalled)
        if hopeless or self.failures >= _MOST_FAILURES:
            raise error


@dataclass(frozen=True)
class _Rest:
    """A replica that failed `times` times in a row, and is left alone until then while there is another."""

    times: int
    until: float


class Rests:
    """The replicas that rest. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._rests: dict[str, _Rest] = {}

    def sound(self, name: str, now: float) -> bool:
        """Whether a replica does not rest."""
        return name not in self._rests or self._rests[name].until <= now

    def note(self, replica: ServiceRecord, error: TinsmithError, now: float) -> None:
        """A replica answered with an error. What it refused for load others have, and for longer what it
        fails at by something that they may do well."""
        if isinstance(error, Overloaded):
            before = self._rests.get(replica.incarnation, _Rest(0, 0.0))
            until = max(before.until, now + _FULL_S)
            self._rests[replica.incarnation] = replace(before, until=until)
        elif error.category == "server" and not isinstance(
            error, Unavailable | SnapshotNotFound | DeadlineExceeded
        ):
            self._fail(replica, now)

    def well(self, name: str) -> None:
        """A replica answered as it should."""
        self._rests.pop(name, None)

    def keep(self, live: Collection[str]) -> None:
        """Forgets replicas that are gone."""
        self._rests = {name: rest for name, rest in self._rests.items() if name in live}

    def _fail(self, replica: ServiceRecord, now: float) -> None:
        before = self._rests.get(replica.incarnation)
        times = 1 if before is None else before.times + 1
        seconds = backoff(times, _FIRST_REST_S, _MOST_REST_S)
        self._rests[replica.incarnation] = _Rest(times, now + seconds)
        log.warning("sampler %s failed %d times in a row; it rests for %g s", replica.id, times, seconds)


class RedisAway:
    """What waits for Redis on one gateway, for the log and the metrics."""

    _SAID: ClassVar = {
        "paused": "what is paused until the next audit",
        "unwritten": "results that are written again until they are",
    }

    def __init__(self, log: logging.Logger) -> None:
        self._repeats = Repeats(log, "samples wait for Redis")
        for what in self._SAID:
            WAITS.labels(what)

    def failed(self, what: Literal["paused", "unwritten"], error: Exception) -> None:
        """A sample waits, or waits on."""
        WAITS.labels(what).inc()
        self._repeats.failed(self._SAID[what], error)

    def over(self) -> None:
        """Redis answers."""
        for said in self._SAID.values():
            self._repeats.over(said)


class Silent:
    """The replicas that did not answer when they were asked for a sample. One at a time asks such a replica
    until it answers, so that it keeps nobody long from asking others. Times are seconds of one clock.

    Args:
        answer: how long an answer may take.
    """

    def __init__(self, answer: float) -> None:
        self._answer = answer
        self._until: dict[str, float] = {}

    def may_ask(self, name: str, now: float) -> bool:
        """Whether a replica is to be asked now. Of a silent one that holds for one who asks."""
        if name not in self._until:
            return True
        if self._until[name] > now:
            return False
        self._until[name] = now + self._answer
        return True

    def note(self, name: str, now: float) -> None:
        """A replica did not answer."""
        self._until[name] = now + _SILENT_S

    def well(self, name: str) -> None:
        """A replica answered."""
        self._until.pop(name, None)

    def keep(self, live: Collection[str]) -> None:
        """Forgets replicas that are gone."""
        self._until = {name: until for name, until in self._until.items() if name in live}


def let_go(model_id: str, version: int) -> SnapshotNotFound:
    """That a snapshot is not there any more, and why."""
    return SnapshotNotFound(
        f"snapshot {version} of model {model_id} was deleted to make room: it had not been "
        "sampled for a while; save the weights again, and give what is to stay a name",
        "snapshot_let_go",
    )
