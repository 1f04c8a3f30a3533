"""Where records are made: one way in for both protocols, and one for what no method does.

Invariants: a record is in the log before the act is answered, whatever Redis does. Records wait for Redis in
bounded memory; what finds no room there is counted, and only in the log. A call whose caller is known, and
whose method is one of `ACTS` with a row, is one record, however it ends. A call of any other method that is
refused for who made it is counted in one (`refusals`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque

from prometheus_client import Counter
from redis.exceptions import RedisError

from services.common.contract.errors import PermissionDenied, TinsmithError, Unauthenticated
from services.common.process import redis_errors
from services.common.process.periodic import Periodic
from services.common.telemetry import logs, subject
from services.gateway.audit.acts import ACTS, Recorded, Source, object_of, value_of
from services.gateway.audit.record import AuditRecord, cut, new_id
from services.gateway.audit.refusals import Refusal, Refusals
from services.gateway.audit.store import AuditStore

log = logging.getLogger("tinsmith.audit")
# Whatever else a process leaves out of its log.
log.setLevel(logging.INFO)

RECORDS = Counter("tinsmith_audit_records_total", "Acts that were written down in the log", ["event"])
DROPPED = Counter(
    "tinsmith_audit_dropped_total",
    "Of those, records that Redis was away for so long that only the log has them",
)

_MOST_WAITING = 20_000
_AT_ONCE = 256
_FLUSH_S = 0.25
_FLUSH_DEADLINE_S = 60.0
_REFUSALS_S = 60.0
_SWEEP_S = 60.0
_LAST_FLUSH_S = 5.0


class Act:
    """A call while it runs: what becomes known of it.

    Attributes:
        outcome: that its record will tell, unless it raises.
    """

    def __init__(self, recorded: Recorded | None) -> None:
        self._recorded = recorded
        self._sources: list[Source] = []
        self.outcome = "accepted" if recorded is not None and recorded.later else "ok"

    @property
    def counts(self) -> bool:
        """Whether anything is written down of it."""
        return self._recorded is not None

    def saw(self, source: Source) -> None:
        """Values of the request or the answer."""
        if self._recorded is not None:
            self._sources.append(source)

    def record(self, method: str, owner: str, key_id: str, address: str) -> AuditRecord | None:
        """What is written down of it; None: nothing."""
        about, recorded = subject.current() or subject.Subject(), self._recorded
        if recorded is None:
            return None
        noted = {"model_id": about.model_id, "request_id": about.request_id, "id": key_id}
        sources: list[Source] = [*self._sources, noted.get]
        if recorded.unless_without and not value_of(recorded.unless_without, sources):
            return None
        found = {name: value_of(name, sources) for name in recorded.details}
        return AuditRecord(
            id=new_id(),
            at=time.time(),
            event=recorded.event,
            outcome=about.refused or self.outcome,
            owner=owner,
            key_id=key_id,
            method=method,
            object=object_of(recorded, sources),
            address=cut(address),
            trace_id=about.trace_id,
            request_id=cut(about.request_id),
            details={name: value for name, value in found.items() if value},
        )


class AuditTrail:
    """Writes down what is done through one gateway."""

    def __init__(self, store: AuditStore, most_waiting: int = _MOST_WAITING) -> None:
        self._store = store
        self._most = most_waiting
        self._waiting: deque[AuditRecord] = deque()
        self._refusals = Refusals()
        self._told_dropped = False
        self._flushes = Periodic("audit", _FLUSH_S, self.flush, _FLUSH_DEADLINE_S)
        self._counts = Periodic("audit of refusals", _REFUSALS_S, self.tell_refusals, _FLUSH_DEADLINE_S)
        self._sweeps = Periodic("audit sweep", _SWEEP_S, store.sweep, _FLUSH_DEADLINE_S)

    async def start(self) -> None:
        self._flushes.start()
        self._counts.start()
        self._sweeps.start()

    async def stop(self) -> None:
        """Keeps what waits, unless Redis is away."""
        for work in (self._sweeps, self._counts, self._flushes):
            await work.stop()
        await self.tell_refusals()
        try:
            async with asyncio.timeout(_LAST_FLUSH_S):
                await self.flush()
        except (RedisError, OSError, TimeoutError) as error:
            log.warning("%d records of acts are only in the log: %s", len(self._waiting), error)
            DROPPED.inc(len(self._waiting))

    @property
    def waiting(self) -> int:
        """Records that Redis does not have yet."""
        return len(self._waiting)

    def act(self, method: str, owner: str, key_id: str, address: str) -> _Acting:
        """A context that has a call written down when it ends.

        Args:
            method: of ACTS.
            owner, key_id: who makes it.
            address: from where.
        """
        return _Acting(self, method, owner, key_id, address)

    def refused(self, refusal: Refusal) -> None:
        """Counts a call that was refused for who made it; within a minute it is in a record."""
        self._refusals.note(refusal)

    def tell(self, record: AuditRecord) -> None:
        """Writes a record down: at once in the log, soon in Redis."""
        RECORDS.labels(record.event).inc()
        _write(record)
        if len(self._waiting) >= self._most:
            DROPPED.inc()
            if not self._told_dropped:
                log.error("%d records of acts wait for Redis: further ones are only in the log", self._most)
            self._told_dropped = True
            return
        self._waiting.append(record)

    async def flush(self) -> None:
        """Hands Redis what waits. Raises RedisError; what was not handed over waits on."""
        while self._waiting:
            some = [self._waiting[index] for index in range(min(_AT_ONCE, len(self._waiting)))]
            await self._store.add(some)
            for _ in some:
                self._waiting.popleft()
        self._told_dropped = False

    async def tell_refusals(self) -> None:
        """Writes down what was refused since the last time."""
        for record in self._refusals.take(time.time()):
            self.tell(record)


class _Acting:
    """A call that is written down when it ends. Not a generator: every request has one."""

    def __init__(self, trail: AuditTrail, method: str, owner: str, key_id: str, address: str) -> None:
        self._trail = trail
        self._by = (method, owner, key_id, address)
        self._act = Act(ACTS[method])

    def __enter__(self) -> Act:
        return self._act

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        act = self._act
        if error is None and not act.counts:
            return
        if error is not None:
            act.outcome = _outcome(error)
        record = act.record(*self._by)
        if record is not None:
            self._trail.tell(record)
        elif isinstance(error, PermissionDenied | Unauthenticated):
            method, owner, key_id, address = self._by
            about = subject.current()
            trace_id = about.trace_id if about else ""
            self._trail.refused(Refusal(act.outcome, method, address, "", owner, key_id, trace_id))


def _outcome(error: BaseException) -> str:
    if isinstance(error, TinsmithError):
        return error.code
    if isinstance(error, RedisError):
        return redis_errors.typed(error).code
    return "internal" if isinstance(error, Exception) else "cancelled"


def _write(record: AuditRecord) -> None:
    """A line of the log. In JSON its members are the record's, "at" is its time."""
    told: dict[str, str | int | float] = {
        "audit_id": record.id,
        "event": record.event,
        "outcome": record.outcome,
        "owner": record.owner,
        "key_id": record.key_id,
        "method": record.method,
        "object": record.object,
        "address": record.address,
        "trace_id": record.trace_id,
        "request_id": record.request_id,
        "count": record.count,
        **{f"detail_{name}": value for name, value in record.details.items()},
    }
    log.info(
        "%s %s: %s by %s (key %s) from %s with %s, %d times; %s",
        record.event,
        record.object or "-",
        record.outcome,
        record.owner or "nobody known",
        record.key_id or "-",
        record.address or "-",
        record.method,
        record.count,
        record.details,
        extra=logs.fields({name: value for name, value in told.items() if value != ""}),
    )
