"""One gateway, put together from its parts.

Invariant: every store, service and dispatcher of a gateway is made here, once. A part is given those that it
needs, is started after them and stopped before them.
"""

from __future__ import annotations

import time
from typing import Protocol

import redis.asyncio

from services.common.contract.errors import TinsmithError
from services.common.state.journal import Journal
from services.common.state.journal_records import JournalLimits
from services.common.state.room import Room, RoomLimits
from services.common.storage.base import Storage
from services.common.storage.data_dir import DataDir
from services.common.telemetry import subject
from services.common.telemetry.frozen import FrozenLoop
from services.common.telemetry.loop_lag import LoopLag
from services.common.telemetry.metrics import Reading
from services.common.tls.wires import Identity
from services.gateway.access.answer_room import AnswerRoom
from services.gateway.access.body_budget import BodyBudget
from services.gateway.access.gate import Gate
from services.gateway.access.limits import Limits
from services.gateway.access.memory import Memory
from services.gateway.access.page_turns import PageTurns
from services.gateway.access.turns import Turns
from services.gateway.administration.administration import Administration
from services.gateway.application import Application
from services.gateway.audit.refusals import Refusal
from services.gateway.audit.store import AuditStore
from services.gateway.audit.trail import AuditTrail
from services.gateway.checkpoints.checkpoints import Checkpoints
from services.gateway.checkpoints.downloads import Downloads
from services.gateway.checkpoints.files import CheckpointFiles
from services.gateway.cluster.base_models import BaseModels
from services.gateway.cluster.discovery import Discovery
from services.gateway.cluster.readiness import Readiness
from services.gateway.cluster.redis_memory import RedisMemory
from services.gateway.cluster.redis_restart import RedoLog
from services.gateway.dispatch.dispatcher import Dispatcher
from services.gateway.dispatch.plan import DispatchSettings
from services.gateway.dispatch.record_results import ResultRecorder
from services.gateway.identity.door import Door, Told
from services.gateway.identity.key import Caller
from services.gateway.identity.key_store import KeyStore
from services.gateway.identity.ring import KeyRing
from services.gateway.identity.signed_urls import SignedUrls
from services.gateway.inference.inference import Inference
from services.gateway.inference.sessions import InferenceSessions
from services.gateway.inference.streams import SampleStreams
from services.gateway.inference.tokenizer_files import TokenizerFiles
from services.gateway.inference.tokenizers import Tokenizers
from services.gateway.placement.model_runners import MixedRunners
from services.gateway.placement.news import PlacementNews
from services.gateway.placement.placements import Placements
from services.gateway.records.stores import Stores
from services.gateway.records.usage import UsageStore
from services.gateway.results.fetched import FetchedResults
from services.gateway.results.futures import Futures
from services.gateway.results.several import Several
from services.gateway.retention.checkpoint_sweep import CheckpointSweep
from services.gateway.retention.forget import Forgetting
from services.gateway.retention.orphan_sweep import OrphanSweep
from services.gateway.retention.plan import RetentionSettings
from services.gateway.retention.retention import Retention
from services.gateway.retention.snapshot_plan import SnapshotBudget
from services.gateway.retention.snapshot_room import SnapshotRoom, budget_on
from services.gateway.retention.snapshot_sweep import SnapshotSweep
from services.gateway.sampling.accept import Sampling
from services.gateway.sampling.admission import Admission
from services.gateway.sampling.completions import Completions
from services.gateway.sampling.dispatcher import SampleDispatcher
from services.gateway.sampling.replicas import Replicas
from services.gateway.sessions.search import SessionSearch
from services.gateway.sessions.sessions import Sessions
from services.gateway.sessions.use import SessionUse
from services.gateway.timelines.timelines import Timelines
from services.gateway.training.accept import Models
from services.gateway.training.copies import Copies
from services.gateway.training.copy_claims import CopyClaims
from services.gateway.training.exports import Exports
from services.gateway.training.runs import Runs
from services.gateway.training.saves import Saves


class Part(Protocol):
    """What works in the background."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


class Gateway:
    """A gateway's parts, started and stopped together.

    Attributes:
        application: what the edges call.
        stores: its records.
        journal: the operations of its models.
        files: of the checkpoints.
        discovery: who is there.
        recorder: records what operations come to.
        checkpoint_sweep: takes away what expired.
        lag: how long the event loop stood still.
    """

    def __init__(
        self,
        gateway_id: str,
        client: redis.asyncio.Redis,
        keys: KeyRing,
        storage: Storage,
        data: DataDir,
        retention: RetentionSettings | None = None,
        journal_limits: JournalLimits | None = None,
        limits: Limits | None = None,
        room_limits: RoomLimits | None = None,
        snapshots: SnapshotBudget | None = None,
        memory: Memory | None = None,
        dispatch: DispatchSettings | None = None,
        public_url: str = "",
        near_clients: bool = True,
        who: Identity | None = None,
    ) -> None:
        """Puts everything together over one Redis. Call within the event loop that will run it.

        Args:
            gateway_id: stable over restarts of the gateway.
            storage: of named checkpoints and exports.
            data: where sampler snapshots are.
            snapshots: what those without a name may take; None: a share of their volume.
            dispatch: how operations are sent to trainers.
            public_url: what download links begin with; empty: as the request for them names the gateway.
            near_clients: whether clients that connect over loopback have the files of this machine.
            who: this gateway, to trainers and samplers; None: they are called in the clear.
        """
        limits, memory = limits or Limits(), memory or Memory.of()

        # What is kept: records and operations in Redis, files beside it.
        self._room = room = Room(room_limits)
        self.stores = stores = Stores.over(client, room)
        self.journal = journal = Journal(client, journal_limits or JournalLimits(), gateway_id, room)
        self.files = CheckpointFiles(storage, data, stores.sampling_sessions, stores.sessions)
        redo_log = RedoLog(client, journal.announce_again, memory.redo // 2)

        # Who is there, and who waits.
        self.discovery = discovery = Discovery(client, stores.poison, who=who)
        base_models = BaseModels(discovery)
        gate, self.lag, turns = Gate(limits.owners), LoopLag(), Turns()
        answers = AnswerRoom(memory.answers)
        futures = Futures(client)
        fetched = FetchedResults(client, room, futures.is_resolving)

        # What carries out what was accepted.
        timelines = Timelines(client, room)
        self.recorder = ResultRecorder(stores)
        self.dispatcher = dispatcher = Dispatcher(
            client,
            journal,
            stores,
            discovery.trainers,
            futures,
            gateway_id,
            self.recorder.record,
            timelines,
            dispatch,
            memory=memory.dispatch,
        )
        self.admission = admission = Admission(limits.waiting_sequences, memory.samples)
        placements = Placements(gateway_id, time.monotonic)
        replicas = Replicas(discovery.samplers, placements, answers)
        runners = MixedRunners()
        discovery.samplers.listen(lambda: runners.look(discovery.samplers.all()))
        samples = SampleDispatcher(
            client,
            stores,
            replicas,
            discovery.gateways,
            gateway_id,
            admission,
            timelines,
            futures,
            redo_log,
        )

        # Who may, and who did.
        audit_store = AuditStore(client)
        self.audit = audit = AuditTrail(audit_store)

        signed_urls = SignedUrls(client, keys, public_url)

        # What accepts it.
        sessions = Sessions(stores.sessions, limits, redo_log, room)
        usage = UsageStore(client)
        use = SessionUse(usage, stores.sessions)
        checkpoints = Checkpoints(stores.checkpoints, stores.models, self.files, limits, redo_log)
        copies = Copies(
            stores,
            sessions,
            checkpoints,
            storage,
            data,
            limits,
            redo_log,
            gate,
            CopyClaims(client, stores.checkpoints),
        )
        snapshot_room = SnapshotRoom(stores.snapshots, data, snapshots or budget_on(data, 0, 0))
        models = Models(
            journal, sessions, stores.models, checkpoints, base_models, dispatcher.wake, limits, redo_log
        )
        accepted_samples = Sampling(
            stores.samples,
            sessions,
            checkpoints,
            stores.sampling_sessions,
            base_models,
            samples.submit,
            gateway_id,
            admission,
            limits,
            redo_log,
        )
        inference_sessions = InferenceSessions(sessions, accepted_samples)
        inference = Inference(
            accepted_samples,
            sessions,
            inference_sessions,
            Tokenizers(replicas.tokenizer),
            replicas,
            futures,
            fetched,
            turns,
            answers,
        )
        self.application = Application(
            keys=keys,
            key_store=KeyStore(client),
            administration=Administration(client, stores),
            door=Door(keys, _tells(audit)),
            audit=audit,
            audit_store=audit_store,
            base_models=base_models,
            sessions=sessions,
            session_search=SessionSearch(stores.sessions, stores.checkpoints, usage, limits),
            use=use,
            models=models,
            saves=Saves(models, checkpoints, base_models, stores.sampling_sessions, limits, snapshot_room),
            exports=Exports(models, checkpoints, journal, stores.models, limits),
            checkpoints=checkpoints,
            copies=copies,
            downloads=Downloads(signed_urls, checkpoints, storage, gate),
            signed_urls=signed_urls,
            timelines=timelines,
            runs=Runs(stores.models, stores.sessions, stores.checkpoints, limits),
            sampling=accepted_samples,
            inference=inference,
            tokenizer_files=TokenizerFiles(base_models, replicas.tokenizer),
            sample_streams=SampleStreams(accepted_samples, sessions, replicas, futures, fetched, answers),
            futures=futures,
            several=Several(futures),
            fetched=fetched,
            completions=Completions(stores.samples, futures, fetched),
            redo_log=redo_log,
            readiness=Readiness(client, gateway_id, lambda: dispatcher.trouble),
            limits=limits,
            near_clients=near_clients,
            gate=gate,
            budget=BodyBudget(memory),
            answers=answers,
            turns=turns,
            page_turns=PageTurns(),
        )

        # What lets go of it.
        self.checkpoint_sweep = CheckpointSweep(client, stores.checkpoints, self.files, gateway_id)
        snapshot_sweep = SnapshotSweep(client, stores, snapshot_room, gateway_id)
        retention = retention or RetentionSettings()
        letting_go = Retention(
            client,
            journal,
            stores,
            dispatcher,
            discovery.trainers,
            accepted_samples.cancel_samples_of_session,
            data,
            gateway_id,
            retention,
        )
        self._parts: tuple[Part, ...] = (
            self.lag,
            FrozenLoop(),
            keys,
            audit,
            RedisMemory(client, room),
            stores.poison,
            redo_log,
            futures,
            fetched,
            discovery,
            timelines,
            dispatcher,
            PlacementNews(client, placements),
            samples,
            inference_sessions,
            copies,
            use,
            letting_go,
            Forgetting(client, stores, gateway_id, retention.forget_after),
            snapshot_sweep,
            OrphanSweep(client, data),
            self.checkpoint_sweep,
        )

    def load(self) -> dict[str, int]:
        """What this gateway announces of itself as it is now: fields of ServiceRecord."""
        seen = self.lag.seen
        return {"stalls": seen.times, "longest_stall_ms": round(seen.longest * 1000)}

    def readings(self) -> tuple[Reading, ...]:
        """What it holds at present, for its metrics."""
        held, admission = self.application, self.admission
        return (
            Reading(
                "models_led",
                "Models whose operations this gateway sends to trainers",
                lambda: self.dispatcher.led,
            ),
            Reading(
                "futures_waited_for", "Futures that clients wait for here", lambda: held.futures.waited_for
            ),
            Reading(
                "request_bytes", "Memory of requests that are not in the journal", lambda: held.budget.used
            ),
            Reading(
                "keys_file_wrong_lines",
                "Lines of the file of API keys that let nobody in; 1 also while it cannot be read",
                lambda: held.keys.trouble,
            ),
            Reading("answer_bytes", "Memory of answers until clients have them", lambda: held.answers.held),
            Reading(
                "sample_sequences",
                "Sequences of samples that wait or run",
                admission.by_class,
                "owner_class",
            ),
            Reading("redis_used_bytes", "Memory that Redis has in use", lambda: self._room.memory[0]),
            Reading(
                "audit_waiting_records", "Records of acts that wait for Redis", lambda: self.audit.waiting
            ),
            Reading("redis_max_bytes", "Its maxmemory; 0 = none", lambda: self._room.memory[1]),
            Reading("state_bytes", "Requests, results and records that Redis keeps", lambda: self._room.held),
            Reading("result_bytes", "Of them, results until they expire", lambda: self._room.results),
            Reading("journal_bytes", "Of them, operations in journals", lambda: self._room.journals),
            Reading("state_max_bytes", "What they may take", lambda: self._room.total),
            Reading("sample_request_bytes", "Memory of their requests", lambda: admission.nbytes),
        )

    async def start(self) -> None:
        """Starts listening for results and carrying out what was accepted."""
        for part in self._parts:
            await part.start()

    async def stop(self) -> None:
        """Stops, also what has started only in part; what is unfinished is taken over by another gateway."""
        for part in reversed(self._parts):
            await part.stop()


def _tells(audit: AuditTrail) -> Told:
    """Tells the audit of those whom the door refuses."""

    def refused(error: TinsmithError, method: str, address: str, key: str, caller: Caller | None) -> None:
        about = subject.current()
        who = ("", "") if caller is None else (caller.owner, caller.key_id)
        audit.refused(Refusal(error.code, method, address, key, *who, about.trace_id if about else ""))

    return refused
