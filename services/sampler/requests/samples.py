"""Runs samples: a place, its weights, the engine.

Invariant: a request that was refused, failed or was cancelled holds nothing afterwards: no place, no
snapshot, no engine request.
"""

from __future__ import annotations

import time
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from prometheus_client import Histogram

from services.common.telemetry.metrics import LONG_S
from services.sampler.engine.sampling import Limits, SampleJob, SampleOutput, Tell, check
from services.sampler.engine.snapshot_key import Adapter, SnapshotKey
from services.sampler.requests.admission import LATE_S, Admission
from services.sampler.requests.suspects import Suspects

SECONDS = Histogram(
    "tinsmith_sample_seconds", "Samples that were generated, their wait included", buckets=LONG_S
)
WAITED = Histogram("tinsmith_sample_wait_seconds", "Until a sample's weights were there", buckets=LONG_S)


class SamplingEngine(Protocol):
    """What this needs of an engine."""

    limits: Limits

    async def sample(
        self, job: SampleJob, adapter: Adapter | None, tell: Tell | None = None
    ) -> SampleOutput: ...

    def late(self, seconds: float) -> int: ...


class Weights(Protocol):
    """What this needs of the snapshots."""

    def is_ready(self, key: SnapshotKey | None) -> bool: ...

    def use(self, key: SnapshotKey | None) -> AbstractAsyncContextManager[Adapter | None]: ...


class Samples:
    """The samples of one engine."""

    def __init__(
        self, engine: SamplingEngine, snapshots: Weights, admission: Admission, suspects: Suspects
    ) -> None:
        self._engine = engine
        self._suspects = suspects
        self._snapshots = snapshots
        self._admission = admission
        self.running = 0
        """Requests that are taken on and have not ended."""

    async def run(self, job: SampleJob, tell: Tell | None = None) -> SampleOutput:
        """Generates. Cancelling the caller frees the engine.

        Args:
            tell: is told tokens as they come.

        Raises:
            InvalidRequest: the engine cannot do what is asked.
            Overloaded: not now.
            GivenUp: this request has ended the engine too often.
            TinsmithError: as Snapshots.use and Engine.sample.
        """
        began = time.monotonic()
        check(job, self._engine.limits)
        self._suspects.check(job.request_id)
        ready, late = self._snapshots.is_ready(job.snapshot), self._engine.late(LATE_S)
        with self._admission.place(job.num_samples, ready, late) as place:
            self.running += 1
            try:
                async with (
                    self._suspects.turn(job.request_id),
                    self._snapshots.use(job.snapshot) as adapter,
                ):
                    place.enter()
                    WAITED.observe(time.monotonic() - began)
                    with self._suspects.executing(job.request_id):
                        output = await self._engine.sample(job, adapter, tell)
                SECONDS.observe(time.monotonic() - began)
                return output
            finally:
                self.running -= 1
