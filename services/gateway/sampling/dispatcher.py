"""Dispatch of samples to sampler replicas.

Invariants: an accepted sample is on the list of exactly one live gateway, or of a dead one whose list
a live one takes over, until its result is published; its result is published once. Sampling changes
nothing, so a sample may run twice, but only when a replica was lost: one of a lost gateway is asked for at
the replica that has it. A result is written again until it is, however long Redis is away. A sample that
was cancelled, through whichever gateway, stops here and at its replica at once, or at the next audit when the
word was lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from functools import partial

import redis.asyncio
from prometheus_client import Histogram
from redis.exceptions import RedisError

from services.common.contract import errors
from services.common.contract.errors import Overloaded, SnapshotNotFound, TinsmithError, Unavailable
from services.common.process import failpoints
from services.common.process.periodic import Periodic
from services.common.process.tasks import cancel_all
from services.common.state import keys
from services.common.state.journal_records import NOTHING_USED, Accepted, Published, Use
from services.common.state.registry import TTL_S
from services.common.telemetry import subject, tracing
from services.common.telemetry.metrics import LONG_S
from services.common.telemetry.subject import Subject
from services.gateway.access.fair_slots import FairSlots
from services.gateway.cluster.base_models import retired
from services.gateway.cluster.discovery import Services
from services.gateway.cluster.redis_restart import RedoLog
from services.gateway.dispatch.plan import backoff
from services.gateway.records.sampling_session import SamplingSessionRecord
from services.gateway.records.stores import Stores
from services.gateway.results.futures import Futures
from services.gateway.results.subscription import Subscription
from services.gateway.sampling.admission import Admission
from services.gateway.sampling.claims import Claims
from services.gateway.sampling.known_sessions import KnownSessions
from services.gateway.sampling.replicas import Replicas, wanted_by
from services.gateway.sampling.running import Followed, Running, kept, untouched
from services.gateway.sampling.tries import RedisAway, Tries, let_go
from services.gateway.sampling.used import event_of, used_by
from services.gateway.timelines.timelines import Timelines
from tinsmith.internal.v1 import sampler_pb2
from tinsmith.v1.results_pb2 import OperationResult

log = logging.getLogger(__name__)

TURN_SECONDS = Histogram(
    "tinsmith_sample_turn_seconds",
    "Until it was the turn of a sample's API key at the replicas",
    ["owner_class"],
    buckets=LONG_S,
)

_AUDIT_S, _AUDIT_DEADLINE_S = 3.0, 60.0
_LOOK_AGAIN_S = 60.0
_SESSION_S = 20.0
"""That a sampling session which is not found may take to be restored."""
UNSAID_SEQUENCES = 1024
"""That run at once before any replica has said how many it generates."""


class SampleDispatcher:
    """Runs this gateway's samples, and those of gateways that died.

    Before it is started, and after it is stopped, samples stay on the gateway's list.

    Args:
        gateways: the live gateways.
        gateway_id: stable over restarts of the gateway; what an earlier start left is taken up by `start`.
        admission: counts this gateway's samples; those that end are released.
        timelines: are told of every result.
        futures: who waits for results here.
        redo_log: what was accepted and written of late.
        dead_after: seconds that a gateway must be missing before its samples are taken over.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        stores: Stores,
        replicas: Replicas,
        gateways: Services,
        gateway_id: str,
        admission: Admission,
        timelines: Timelines,
        futures: Futures,
        redo_log: RedoLog,
        dead_after: float = TTL_S / 2,
    ) -> None:
        self._journal, self._futures = stores.samples, futures
        self._redo_log = redo_log
        self._timelines = timelines
        self._gateway_id = gateway_id
        self._dead_after = dead_after
        self._sessions = KnownSessions(stores.sampling_sessions, _SESSION_S)
        self._inflight = stores.inflight
        self._snapshots = stores.snapshots
        self._replicas = replicas
        replicas.listen(self._resize)
        self._gateways = gateways
        self._cancellations = Subscription(client, keys.CANCEL_CHANNEL, self._cancel, lambda: None)
        self._followed = Running(client, stores.inflight, stores.snapshots, replicas)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._claimed: set[str] = set()
        self._new: set[str] = set()
        self._admission = admission
        self._claims = Claims(stores.samples, stores.poison, gateway_id, admission, self._on_claimed)
        self._slots_of: dict[str, FairSlots] = {}
        self._missing_since: dict[str, float] = {}
        self._away = RedisAway(log)
        self._dispatching = False
        self._audits = Periodic("sample audit", _AUDIT_S, self._audit, _AUDIT_DEADLINE_S)

    async def start(self) -> None:
        """Starts dispatching; samples that an earlier start of this gateway left are run too."""
        await self._journal.join(self._gateway_id)
        self._dispatching = True
        self._cancellations.start()
        self._followed.start()
        self._audits.start()

    async def stop(self) -> None:
        """Stops dispatching; unfinished samples stay listed, for another gateway or the next start."""
        self._dispatching = False
        await self._cancellations.stop()
        await self._followed.stop()
        await self._audits.stop()
        # What they run goes on at the replicas for a while: whoever takes them over asks for it there.
        await cancel_all(self._running.values())
        await self._replicas.stop()

    def submit(self, accepted: Accepted, request: sampler_pb2.SampleRequest) -> None:
        """Runs a sample that `SampleJournal.accept` accepted for this gateway. Returns at once.

        A sample that is done, or with another gateway, is left alone.
        """
        request_id, new = accepted.request_id, accepted.to_run
        if new and request_id in self._running:
            # An audit has seen it on the list before it came here. No replica has it but from that.
            self._new.add(request_id)
        self._start(request_id, request if new else None, taken_over=not new)

    def _start(self, request_id: str, request: sampler_pb2.SampleRequest | None, taken_over: bool) -> None:
        """Runs a sample of this gateway unless it runs.

        Args:
            request: None = it is to be claimed.
            taken_over: it may be at a replica already.
        """
        if not self._dispatching or request_id in self._running:
            return
        task = asyncio.create_task(self._run(request_id, request, taken_over), name=f"sample {request_id}")
        self._running[request_id] = task
        self._futures.expect(request_id)
        task.add_done_callback(lambda done: self._ended(request_id, done))

    def _on_claimed(self, request_id: str, request: sampler_pb2.SampleRequest) -> None:
        if self._dispatching and request_id not in self._running:
            # Whose it is, is found out when it runs.
            self._admission.hold(request_id, "", request.num_samples, request.ByteSize())
            self._start(request_id, request, taken_over=True)

    def _cancel(self, request_id: str) -> None:
        """Stops a sample whose future is resolved already."""
        task = self._running.get(request_id)
        if task is not None:
            self._replicas.end(request_id)
            task.cancel()

    def _ended(self, request_id: str, task: asyncio.Task[None]) -> None:
        del self._running[request_id]
        self._futures.expect_no_longer(request_id)
        self._claimed.discard(request_id)
        self._new.discard(request_id)
        self._admission.release(request_id)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, (RedisError, OSError)):
            self._away.failed("paused", error)
        else:
            log.error("sample %s broke off, the next audit goes on", request_id, exc_info=error)

    async def _run(
        self, request_id: str, request: sampler_pb2.SampleRequest | None, taken_over: bool
    ) -> None:
        try:
            request = request or await self._claims.one(request_id, self._gateway_id)
            if request is None:
                return
            self._claimed.add(request_id)
            origin = request.origin
            subject.begin(Subject.of(origin.traceparent, origin.owner, request.snapshot.model_id, request_id))
            session = await self._sessions.of(request_id)
            if not self._admission.holds(request_id, session.owner):
                self._admission.hold(request_id, session.owner, request.num_samples, request.ByteSize())
            with self._followed.follow(request, session.owner) as followed:
                await self._unless_kept(request_id, followed, session, taken_over)
        except TinsmithError as error:
            failed = OperationResult(error=errors.to_pb(error))
            await self._publish(request_id, request or sampler_pb2.SampleRequest(), failed)

    async def _unless_kept(
        self, request_id: str, followed: Followed, session: SamplingSessionRecord, taken_over: bool
    ) -> None:
        tries, request = Tries(), followed.request
        try:
            async with followed.waiting:
                if taken_over:
                    # Not in its turn: a replica that does not answer would keep others from theirs.
                    tries.has_it = await self._replicas.find(session.base_model, request_id)
                await self._in_turn(request_id, followed, session, tries)
        except TimeoutError:
            if not followed.waiting.expired():
                raise
            sent = tries.sent or (taken_over and request_id not in self._new)
            result = await kept(self._replicas, request, session) if sent else None
            if result is None:
                await self._publish(request_id, request, untouched(request))
            else:
                await self._publish(request_id, request, result, used_by(request, session, result))

    async def _in_turn(
        self, request_id: str, followed: Followed, session: SamplingSessionRecord, tries: Tries
    ) -> None:
        """Gets the sample in its owner's turn, and writes it; while samplers refuse it for load, others have
        the slot, but not while Redis is away: what waits to be written would have no bound."""
        request = followed.request
        while True:
            asked, of = time.monotonic(), self._admission.class_of(session.owner)
            await self._followed.note_use(followed)
            slots = self._slots(session.base_model)
            try:
                async with slots.held(session.owner, request.num_samples, request.priority):
                    TURN_SECONDS.labels(of).observe(time.monotonic() - asked)
                    result = await self._sample(request_id, request, session, tries)
                    followed.settle()
                    await self._publish(request_id, request, result, used_by(request, session, result))
                    return
            except Overloaded:
                tries.number += 1
            await asyncio.sleep(backoff(tries.number))

    async def _publish(
        self,
        request_id: str,
        request: sampler_pb2.SampleRequest,
        result: OperationResult,
        use: Use = NOTHING_USED,
    ) -> None:
        """Writes a result, again until it is written: what was generated outlasts an outage of Redis."""
        await failpoints.reach("gateway.before_publish_sample")
        attempt, payload, failed = 0, result.SerializeToString(), result.HasField("error")
        publish = partial(self._journal.publish_bytes, request_id, payload, failed, use, self._gateway_id)
        write = partial(self._redo_log.perform, publish, len(payload), accepts=False)
        while True:
            try:
                outcome = await self._futures.resolve(request_id, payload, write)
                if outcome is Published.PUBLISHED:
                    origin = request.origin
                    self._timelines.note(origin.owner, event_of(request_id, origin, result, time.time()))
                return
            except (RedisError, OSError) as error:
                attempt += 1
                self._away.failed("unwritten", error)
            await asyncio.sleep(backoff(attempt))

    async def _sample(
        self,
        request_id: str,
        request: sampler_pb2.SampleRequest,
        session: SamplingSessionRecord,
        tries: Tries,
    ) -> OperationResult:
        """Gets the sample from some replica; one that was sent out before, from the one that has it.

        Raises:
            Overloaded: the replica takes on no more now.
            TinsmithError: no other replica would do better.
        """
        base_model = session.base_model
        avoided: set[str] = set()
        waiting = False
        while True:
            if session.inflight:
                version = await self._inflight.version(session)
                # One that moves may have heard of a newer one meanwhile.
                request.snapshot.version = max(version, request.snapshot.version)
            # What is sent: while it runs, a sample that moves may be given a newer version.
            snapshot = sampler_pb2.Snapshot(
                model_id=request.snapshot.model_id, version=request.snapshot.version
            )
            if snapshot.model_id:
                await self._snapshots.note_used(snapshot.model_id, snapshot.version, session.owner)
            wanted = wanted_by(request, session.full)
            change = self._replicas.change
            replica = tries.has_it or self._replicas.choose(base_model, wanted, avoided)
            tries.has_it = None
            if replica is None:
                if self._replicas.retired(base_model):
                    raise retired(base_model)
                if not waiting:
                    reason = f"no sampler for {base_model} is ready; the request will run when one is"
                    await self._journal.note_waiting(request_id, reason)
                    waiting = True
                tries.number += 1
                # A lost replica's record may live on for seconds; it may also have been a passing fault.
                most = backoff(tries.number, first=0.2, most=5.0) if avoided else _LOOK_AGAIN_S
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(most):
                        await change.wait()
                avoided.clear()
                continue
            if waiting:
                await self._journal.note_waiting(request_id, "")
                waiting = False
            request.origin.handed_at, tries.sent = time.time(), True
            try:
                with tracing.span("sample", "CLIENT", replica=replica.id):
                    return await self._replicas.call(replica, request, wanted, session.owner)
            except SnapshotNotFound as error:
                tries.number += 1
                if session.inflight and await self._inflight.version(session) > snapshot.version:
                    # The model moved on while this waited, and what it left is gone.
                    continue
                if await self._snapshots.was_let_go(snapshot.model_id, snapshot.version):
                    raise let_go(snapshot.model_id, snapshot.version) from error
                raise
            except Overloaded:
                raise
            except TinsmithError as error:
                tries.note(error, replica)
                if isinstance(error, Unavailable):
                    avoided.add(replica.incarnation)
                await asyncio.sleep(backoff(tries.number))

    def _slots(self, base_model: str) -> FairSlots:
        if base_model not in self._slots_of:
            self._slots_of[base_model] = FairSlots(self._capacity(base_model))
        return self._slots_of[base_model]

    def _capacity(self, base_model: str) -> int:
        ready = self._replicas.ready(base_model).values()
        # What a replica cannot generate at once waits here, where API keys take turns.
        return sum(record.max_sequences or UNSAID_SEQUENCES for record in ready) or UNSAID_SEQUENCES

    def _resize(self) -> None:
        for base_model, slots in self._slots_of.items():
            slots.resize(self._capacity(base_model))

    async def _audit(self) -> None:
        """Starts what is on this gateway's list and not running, stops what is no longer on it, and takes
        over the lists of dead gateways."""
        # Another gateway may have struck this one off while it was stopped.
        await self._journal.join(self._gateway_id)
        claimed = set(self._claimed)
        listed = await self._claims.listed(self._gateway_id)
        for request_id in await self._journal.resolved(claimed - listed):
            self._cancel(request_id)
        await self._claims.all(listed - self._running.keys(), self._gateway_id)
        now = asyncio.get_running_loop().time()
        live = {record.id for record in self._gateways.all()} | {self._gateway_id}
        known = await self._journal.gateways()
        self._missing_since = {name: self._missing_since.get(name, now) for name in known - live}
        for name, since in self._missing_since.items():
            if now - since >= self._dead_after:
                listed |= await self._take_over(name)
        self._claims.forget(listed)
        self._away.over()

    async def _take_over(self, gateway_id: str) -> set[str]:
        """Starts what a dead gateway left, as far as there is room; returns that."""
        left = await self._claims.listed(gateway_id)
        if left:
            log.info("gateway %s left %d samples", gateway_id, len(left))
            await self._claims.all(left - self._running.keys(), gateway_id)
        else:
            await self._journal.leave(gateway_id)
        return left
