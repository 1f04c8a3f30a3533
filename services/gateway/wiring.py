"""One gateway in operation: the application with the dispatchers that carry out what it accepts."""

from __future__ import annotations

import redis.asyncio

from services.common.state.journal import Journal
from services.common.state.journal_records import JournalLimits
from services.common.storage.base import Storage
from services.common.storage.data_dir import DataDir
from services.gateway.access.auth import KeyRing
from services.gateway.access.limits import Limits
from services.gateway.application import Application, build
from services.gateway.checkpoints.files import CheckpointFiles
from services.gateway.dispatch.dispatcher import Dispatcher
from services.gateway.dispatch.record_results import ResultRecorder
from services.gateway.records.checkpoint import CheckpointStore
from services.gateway.records.model import ModelStore
from services.gateway.records.sample_journal import SampleJournal
from services.gateway.records.sampling_session import InflightStore, SamplingSessionStore
from services.gateway.records.session import SessionStore
from services.gateway.results.futures import Futures
from services.gateway.retention.checkpoint_sweep import CheckpointSweep
from services.gateway.retention.plan import RetentionSettings
from services.gateway.retention.retention import Retention
from services.gateway.sampling.admission import Admission
from services.gateway.sampling.dispatcher import SampleDispatcher


class Gateway:
    """Application, dispatchers and the subscription to results, started and stopped together."""

    application: Application

    def __init__(
        self,
        gateway_id: str,
        client: redis.asyncio.Redis,
        keys: KeyRing,
        retention: RetentionSettings,
        journal_limits: JournalLimits,
        storage: Storage,
        data: DataDir,
    ) -> None:
        """Wires everything up over one Redis. Call within the event loop that will run it."""
        journal = Journal(client, journal_limits, gateway_id)
        limits = Limits()
        admission = Admission(limits.waiting_sequences, limits.waiting_sample_bytes)
        records, sampling_sessions = CheckpointStore(client), SamplingSessionStore(client)
        files = CheckpointFiles(storage, data, sampling_sessions, SessionStore(client))
        recorder = ResultRecorder(ModelStore(client), records, sampling_sessions, InflightStore(client))
        futures = Futures(client)
        self._dispatcher = Dispatcher(client, journal, gateway_id, recorder.record, futures)
        self._sample_dispatcher = SampleDispatcher(client, SampleJournal(client), gateway_id, admission)
        self.application = build(
            gateway_id,
            client,
            journal,
            futures,
            keys,
            self._dispatcher.wake,
            self._sample_dispatcher.submit,
            limits,
            admission,
            files,
        )
        self._sweep = CheckpointSweep(client, records, files, gateway_id)
        cancel_samples = self.application.sampling.cancel_samples_of_session
        self._retention = Retention(client, journal, self._dispatcher, cancel_samples, gateway_id, retention)

    async def start(self) -> None:
        """Starts listening for results and dispatching."""
        self.application.redo_log.start()
        await self.application.futures.start()
        await self._dispatcher.start()
        await self._sample_dispatcher.start()
        self._retention.start()
        self._sweep.start()

    async def stop(self) -> None:
        """Stops dispatching; what is unfinished is taken over by another gateway."""
        await self._sweep.stop()
        await self._retention.stop()
        await self._sample_dispatcher.stop()
        await self._dispatcher.stop()
        await self.application.futures.stop()
        await self.application.redo_log.stop()
