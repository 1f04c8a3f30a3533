"""Dispatch of samples to sampler replicas.

Invariants: an accepted sample is on the list of exactly one live gateway, or of a dead one whose list
a live one takes over, until its result is published; its result is published once. Sampling changes
nothing, so a sample may run twice, but only when a replica was lost: one of a lost gateway is asked for at
the replica that has it. A sample that was cancelled, through whichever gateway, stops here and at its replica
at once, or at the next audit when the word was lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass

import redis.asyncio
from cachetools import TTLCache
from google.protobuf.message import DecodeError
from redis.exceptions import RedisError

from services.common.contract import errors, ids
from services.common.contract.errors import (
    Draining,
    Internal,
    InvalidRequest,
    NotFound,
    Overloaded,
    SnapshotNotFound,
    TinsmithError,
    Unavailable,
)
from services.common.process import failpoints
from services.common.process.periodic import Periodic
from services.common.process.tasks import cancel_all
from services.common.state import keys
from services.common.state.journal_records import Accepted
from services.common.state.poison import Unreadable
from services.common.state.registry import TTL_S
from services.gateway.access.fair_slots import FairSlots
from services.gateway.cluster.base_models import retired
from services.gateway.cluster.discovery import Services
from services.gateway.dispatch.plan import backoff
from services.gateway.records.sample_journal import ACCEPTANCE_S, Unclaimed
from services.gateway.records.sampling_session import SamplingSessionRecord
from services.gateway.records.stores import Stores
from services.gateway.results.subscription import Subscription
from services.gateway.sampling import choose_replica
from services.gateway.sampling.admission import Admission
from services.gateway.sampling.replicas import Replicas, Stalled
from tinsmith.internal.v1 import sampler_pb2
from tinsmith.v1 import results_pb2

log = logging.getLogger(__name__)

_AUDIT_S = 3.0
_AUDIT_DEADLINE_S = 60.0
_SESSION_AGAIN_S = 0.2
_LOOK_AGAIN_S = 60.0
_CACHE_S = 3600.0
_CACHED_SESSIONS = 16_384
_MOST_LOST = 5
_MOST_FAILURES = 2


@dataclass(frozen=True)
class SampleSettings:
    """Times in seconds.

    Attributes:
        dead_after: how long a gateway must be missing before its samples are taken over.
        replica_sequences: most sequences that this gateway has one replica generate at once, also when the
            replica can do more; others wait here, where API keys take turns.
        session_timeout: how long a sampling session that is not found may take to be restored.
    """

    session_timeout: float = 20.0
    dead_after: float = TTL_S / 2
    replica_sequences: int = 1024


class SampleDispatcher:
    """Runs this gateway's samples, and those of gateways that died.

    Before it is started, and after it is stopped, samples stay on the gateway's list.

    Args:
        gateways: the live gateways.
        gateway_id: stable over restarts of the gateway; what an earlier start left is taken up by `start`.
        admission: counts this gateway's samples; those that end are released.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        stores: Stores,
        replicas: Replicas,
        gateways: Services,
        gateway_id: str,
        admission: Admission,
        settings: SampleSettings | None = None,
    ) -> None:
        self._journal = stores.samples
        self._poison = stores.poison
        self._gateway_id = gateway_id
        self._settings = settings or SampleSettings()
        self._sessions = stores.sampling_sessions
        self._known: TTLCache[str, SamplingSessionRecord] = TTLCache(_CACHED_SESSIONS, _CACHE_S)
        self._inflight = stores.inflight
        self._snapshots = stores.snapshots
        self._replicas = replicas
        replicas.listen(self._resize)
        self._gateways = gateways
        self._cancellations = Subscription(client, keys.CANCEL_CHANNEL, self._cancel, lambda: None)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._claimed: set[str] = set()
        self._admission = admission
        self._slots_of: dict[str, FairSlots] = {}
        self._missing_since: dict[str, float] = {}
        self._unknown_since: dict[str, float] = {}
        self._dispatching = False
        self._audits = Periodic("sample audit", _AUDIT_S, self._audit, _AUDIT_DEADLINE_S)

    async def start(self) -> None:
        """Starts dispatching; samples that an earlier start of this gateway left are run too."""
        await self._journal.join(self._gateway_id)
        self._dispatching = True
        self._cancellations.start()
        self._audits.start()

    async def stop(self) -> None:
        """Stops dispatching; unfinished samples stay listed, for another gateway or the next start."""
        self._dispatching = False
        await self._cancellations.stop()
        await self._audits.stop()
        # What they run goes on at the replicas for a while: whoever takes them over asks for it there.
        await cancel_all(self._running.values())
        await self._replicas.stop()

    def submit(self, accepted: Accepted, request: sampler_pb2.SampleRequest) -> None:
        """Runs a sample that `SampleJournal.accept` accepted for this gateway. Returns at once.

        A sample that is done, or with another gateway, is left alone.
        """
        self._start(accepted.request_id, self._gateway_id, request if accepted.to_run else None)

    def _start(
        self, request_id: str, from_gateway: str, request: sampler_pb2.SampleRequest | None = None
    ) -> None:
        """Runs a sample unless it runs. `request`: given when the sample is known to be this gateway's."""
        if not self._dispatching or request_id in self._running:
            return
        running = self._run(request_id, from_gateway, request)
        task = asyncio.create_task(running, name=f"sample {request_id}")
        self._running[request_id] = task
        task.add_done_callback(lambda done: self._ended(request_id, done))

    def _cancel(self, request_id: str) -> None:
        """Stops a sample whose future is resolved already."""
        task = self._running.get(request_id)
        if task is not None:
            self._replicas.end(request_id)
            task.cancel()

    def _ended(self, request_id: str, task: asyncio.Task[None]) -> None:
        del self._running[request_id]
        self._claimed.discard(request_id)
        self._admission.release(request_id)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, (RedisError, OSError)):
            log.warning("sample %s paused, the next audit goes on: %s", request_id, error)
        else:
            log.error("sample %s broke off, the next audit goes on", request_id, exc_info=error)

    async def _run(
        self, request_id: str, from_gateway: str, request: sampler_pb2.SampleRequest | None
    ) -> None:
        taken_over = request is None
        try:
            request = request or await self._claim(request_id, from_gateway)
            if request is None:
                return
            self._claimed.add(request_id)
            size = request.ByteSize()
            session = await self._session(request_id)
            self._admission.hold(request_id, session.owner, request.num_samples, size)
            async with self._slots(session.base_model).held(session.owner, request.num_samples):
                result = await self._sample(request_id, request, session, taken_over)
        except TinsmithError as error:
            result = results_pb2.OperationResult(error=errors.to_pb(error))
        await failpoints.reach("gateway.before_publish_sample")
        await self._journal.publish(request_id, result)

    async def _claim(self, request_id: str, from_gateway: str) -> sampler_pb2.SampleRequest | None:
        """The request of a sample that waits on a gateway's list, unless it is not to be run."""
        payload = await self._journal.claim(request_id, from_gateway, self._gateway_id)
        if payload is Unclaimed.UNKNOWN:
            await self._not_accepted(request_id, from_gateway)
        if isinstance(payload, Unclaimed):
            return None
        try:
            return sampler_pb2.SampleRequest.FromString(payload)
        except DecodeError as error:
            name = keys.future(*ids.parse_request_id(request_id))
            self._poison.note(name, str(error))
            raise Unreadable(name, str(error)) from error

    async def _not_accepted(self, request_id: str, gateway_id: str) -> None:
        """The list has a sample that nothing else is known of: its acceptance is under way, or broke off."""
        now = asyncio.get_running_loop().time()
        if now - self._unknown_since.setdefault(request_id, now) >= ACCEPTANCE_S:
            await self._journal.give_up(request_id, gateway_id)

    async def _session(self, request_id: str) -> SamplingSessionRecord:
        session_id, _ = ids.parse_request_id(request_id)
        record = self._known.get(session_id)
        if record is None:
            record = await self._sessions.get(session_id)
            deadline = asyncio.get_running_loop().time() + self._settings.session_timeout
            # It was there when the sample was accepted. A Redis that lost its last second gets it again.
            while record is None and asyncio.get_running_loop().time() < deadline:
                await asyncio.sleep(_SESSION_AGAIN_S)
                record = await self._sessions.get(session_id)
            if record is None:
                raise NotFound(f"sampling session {session_id} does not exist; create one first")
            self._known[session_id] = record
        return record

    async def _sample(
        self,
        request_id: str,
        request: sampler_pb2.SampleRequest,
        session: SamplingSessionRecord,
        taken_over: bool,
    ) -> results_pb2.OperationResult:
        """Gets the sample from some replica; one that was sent out before, from the one that has it.

        Raises:
            TinsmithError: no other replica would do better.
        """
        base_model = session.base_model
        lost: set[str] = set()
        avoided: set[str] = set()
        failures = 0
        attempt = 0
        waiting = False
        has_it = await self._replicas.find(base_model, request_id) if taken_over else None
        while True:
            if session.inflight:
                request.snapshot.version = await self._inflight.version(session)
            snapshot = request.snapshot
            if snapshot.model_id and not session.model_path:
                await self._snapshots.note_used(snapshot.model_id, snapshot.version, session.owner)
            wanted = choose_replica.affinity(
                snapshot.model_id, snapshot.version, session.full, request.prompt.data
            )
            change = self._replicas.change
            replica = has_it or self._replicas.choose(base_model, wanted, avoided)
            has_it = None
            if replica is None:
                if self._replicas.retired(base_model):
                    raise retired(base_model)
                if not waiting:
                    reason = f"no sampler for {base_model} is running; the request will run when one is"
                    await self._journal.note_waiting(request_id, reason)
                    waiting = True
                attempt += 1
                # A lost replica's record may live on for seconds; it may also have been a passing fault.
                most = backoff(attempt, first=0.2, most=5.0) if avoided else _LOOK_AGAIN_S
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(most):
                        await change.wait()
                avoided.clear()
                continue
            if waiting:
                await self._journal.note_waiting(request_id, "")
                waiting = False
            try:
                return await self._replicas.call(replica, request)
            except SnapshotNotFound as error:
                attempt += 1
                if session.inflight and await self._inflight.version(session) > snapshot.version:
                    # The model moved on while this waited, and what it left is gone.
                    continue
                if await self._snapshots.was_let_go(snapshot.model_id, snapshot.version):
                    raise _let_go(snapshot) from error
                raise
            except TinsmithError as error:
                attempt += 1
                if isinstance(error, Unavailable):
                    avoided.add(replica.incarnation)
                    if not isinstance(error, Draining):
                        lost.add(replica.incarnation)
                    if len(lost) >= _MOST_LOST:
                        raise Internal(f"{len(lost)} samplers stopped while they ran this sample") from error
                    log.info("sampler %s lost sample %s: %s", replica.id, request_id, error.message)
                elif not isinstance(error, Overloaded):
                    failures += 1
                    hopeless = error.category == "user" or isinstance(error, Stalled)
                    if hopeless or failures >= _MOST_FAILURES:
                        raise
                await asyncio.sleep(backoff(attempt))

    def _slots(self, base_model: str) -> FairSlots:
        slots = self._slots_of.get(base_model)
        if slots is None:
            slots = self._slots_of[base_model] = FairSlots(self._capacity(base_model))
        return slots

    def _capacity(self, base_model: str) -> int:
        most = self._settings.replica_sequences
        ready = self._replicas.ready(base_model).values()
        # What a replica cannot generate at once waits here, where API keys take turns.
        return sum(min(most, record.max_sequences or most) for record in ready) or most

    def _resize(self) -> None:
        for base_model, slots in self._slots_of.items():
            slots.resize(self._capacity(base_model))

    async def _audit(self) -> None:
        """Starts what is on this gateway's list and not running, stops what is no longer on it, and takes
        over the lists of dead gateways."""
        # Another gateway may have struck this one off while it was stopped.
        await self._journal.join(self._gateway_id)
        claimed = set(self._claimed)
        listed = await self._listed(self._gateway_id)
        for request_id in await self._journal.resolved(claimed - listed):
            self._cancel(request_id)
        for request_id in listed:
            self._start(request_id, self._gateway_id)
        now = asyncio.get_running_loop().time()
        live = {record.id for record in self._gateways.all()} | {self._gateway_id}
        known = await self._journal.gateways()
        self._missing_since = {name: self._missing_since.get(name, now) for name in known - live}
        for name, since in self._missing_since.items():
            if now - since >= self._settings.dead_after:
                listed |= await self._take_over(name)
        unknown = self._unknown_since.items()
        self._unknown_since = {name: since for name, since in unknown if name in listed}

    async def _take_over(self, gateway_id: str) -> set[str]:
        """Starts what a dead gateway left; returns that."""
        left = await self._listed(gateway_id)
        if left:
            log.info("taking over %d samples of gateway %s", len(left), gateway_id)
        for request_id in left:
            self._start(request_id, gateway_id)
        if not left:
            await self._journal.leave(gateway_id)
        return left

    async def _listed(self, gateway_id: str) -> set[str]:
        """The samples on a gateway's list."""
        listed = set()
        for request_id in await self._journal.samples_of(gateway_id):
            try:
                ids.parse_request_id(request_id)
                listed.add(request_id)
            except InvalidRequest as error:
                self._poison.note(f"{keys.gateway_samples(gateway_id)} {request_id}", error.message)
        return listed


def _let_go(snapshot: sampler_pb2.Snapshot) -> SnapshotNotFound:
    return SnapshotNotFound(
        f"snapshot {snapshot.version} of model {snapshot.model_id} was deleted to make room: it had not been "
        "sampled for a while; save the weights again, and give what is to stay a name",
        "snapshot_let_go",
    )
