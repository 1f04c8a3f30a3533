"""Runs samples: a place, its weights, the engine.

Invariant: a request that was refused, failed or was cancelled holds nothing afterwards: no place, no
snapshot, no engine request.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from prometheus_client import Histogram

from services.common.contract.errors import Internal, TinsmithError
from services.common.process.tasks import cancel_all
from services.common.telemetry import subject, tracing
from services.common.telemetry.metrics import LONG_S
from services.common.telemetry.repeats import Repeats
from services.sampler.engine.sampling import (
    SampleJob,
    SampleOutput,
    Tell,
    check,
    unfinished,
    untouched,
)
from services.sampler.engine.snapshot_key import SnapshotKey
from services.sampler.requests.admission import LATE_S, Admission, Place
from services.sampler.requests.course import Course, Turned
from services.sampler.requests.suspects import Suspects
from services.sampler.snapshots.full_snapshots import GivenUp
from services.sampler.snapshots.held import Held
from services.sampler.snapshots.snapshots import Snapshots

if TYPE_CHECKING:
    from services.sampler.engine.engine import Engine

log = logging.getLogger(__name__)

SECONDS = Histogram(
    "tinsmith_sample_seconds", "Samples that were generated, their wait included", buckets=LONG_S
)
WAITED = Histogram("tinsmith_sample_wait_seconds", "Until a sample's weights were there", buckets=LONG_S)
LAG = Histogram(
    "tinsmith_sample_lag_versions",
    "Versions of its model that were newer than a sequence's oldest tokens when its sample ended",
    buckets=(0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128),
)


class Samples:
    """The samples of one engine."""

    def __init__(
        self, engine: Engine, snapshots: Snapshots, admission: Admission, suspects: Suspects
    ) -> None:
        self._engine = engine
        self._suspects = suspects
        self._snapshots = snapshots
        self._admission = admission
        self._courses: dict[str, Course] = {}
        self._stays = Repeats(log, "a sample does not move to newer weights")
        self.running = 0
        """Requests that are taken on and have not ended."""

    async def run(self, job: SampleJob, tell: Tell | None = None) -> SampleOutput:
        """Generates, on one version of the weights after the other when the sample is moved. Cancelling the
        caller frees the engine.

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
        turned = asyncio.Event()

        def interrupt(at_once: bool) -> None:
            if job.keeps_kv and not at_once:
                turned.set()
            else:
                self._engine.interrupt(job.request_id, at_once)

        course = Course(job.snapshot, job.moves, interrupt)
        with self._admission.place(job.num_samples, ready, late) as place:
            self.running += 1
            self._courses[job.request_id] = course
            try:
                async with self._suspects.turn(job.request_id):
                    output = await self._follow(course, job, place, tell, turned)
                SECONDS.observe(time.monotonic() - began)
                self._note_lag(job, output)
                return output
            finally:
                self.running -= 1
                if self._courses.get(job.request_id) is course:
                    del self._courses[job.request_id]

    def _note_lag(self, job: SampleJob, output: SampleOutput) -> None:
        """Measures how far from its model's newest weights a sample was generated."""
        if job.snapshot is None:
            return
        for sequence in output.sequences:
            if sequence.versions:
                oldest = dataclasses.replace(job.snapshot, version=sequence.versions[0].version)
                LAG.observe(self._snapshots.newer(oldest))

    def move(self, request_id: str, weights: SnapshotKey | None) -> bool:
        """Has a running sample that moves go on with newer weights; any other stays as it is. Whether it
        runs."""
        course = self._courses.get(request_id)
        if course is not None:
            course.move(weights)
        return course is not None

    def end(self, request_id: str) -> bool:
        """Has a running sample end with what it has come to; whether it runs."""
        course = self._courses.get(request_id)
        if course is not None:
            course.end()
        return course is not None

    async def _follow(
        self, course: Course, job: SampleJob, place: Place, tell: Tell | None, turned: asyncio.Event
    ) -> SampleOutput:
        while not course.ended:
            key = course.weights
            on_these = job if key == job.snapshot else dataclasses.replace(job, snapshot=key)
            try:
                output = await self._segment(course, on_these, place, tell, turned)
            except Turned:
                continue
            except _NotThere as error:
                if course.weights != key:
                    # Newer ones have come meanwhile.
                    continue
                if job.begun is None or key == job.snapshot or isinstance(error.reason, GivenUp):
                    raise error.reason from error
                # Its old ones are as good as they were.
                self._stays.failed(str(key), error.reason)
                course.weights = job.snapshot
                continue
            if not unfinished(output):
                return output
            if not course.ended and course.weights == key:
                raise Internal("the engine ended a sequence by itself; try again")
            job = dataclasses.replace(job, snapshot=key, begun=output, left=time.monotonic())
        return job.begun or untouched(job)

    async def _segment(
        self, course: Course, job: SampleJob, place: Place, tell: Tell | None, turned: asyncio.Event
    ) -> SampleOutput:
        """What a job has come to by when it ends, or its course turns and it keeps no keys and values.

        Raises:
            Turned: its course turned before it began.
            _NotThere: its weights are not to be had.
        """
        began = time.monotonic()
        async with _Holding(course, self._snapshots, job.snapshot) as held:
            course.enter(job.snapshot)
            place.enter()
            WAITED.observe(time.monotonic() - began)
            tracing.record("wait for the weights", subject.current(), began)
            try:
                with self._suspects.executing(job.request_id), tracing.span("generate"):
                    if not job.keeps_kv:
                        return await self._engine.sample(job, held.adapter, tell)
                    async with self._shifting(course, job, held, turned):
                        return await self._engine.sample(job, held.adapter, tell)
            finally:
                place.leave()

    @asynccontextmanager
    async def _shifting(
        self, course: Course, job: SampleJob, held: Held, turned: asyncio.Event
    ) -> AsyncIterator[None]:
        """Meanwhile the job, which the engine has with what is held, goes on with newer weights when its
        course turns, and keeps its keys and values. While these are waited for it goes on with those that it
        has."""
        shifts = asyncio.create_task(self._shift(course, job, held, turned), name=f"shift {job.request_id}")
        try:
            yield
        finally:
            await cancel_all([shifts])
            if not shifts.cancelled() and isinstance(error := shifts.exception(), Exception):
                # The answer says which weights made what.
                self._stays.failed(str(course.weights), error, foreseen=False)

    async def _shift(self, course: Course, job: SampleJob, held: Held, turned: asyncio.Event) -> None:
        present = job.snapshot
        while True:
            await turned.wait()
            turned.clear()
            key = course.weights
            if key is None or key == present:
                continue
            there = False
            try:
                if held.adapter is None:
                    if not await self._update(held, key, turned):
                        continue
                else:
                    async with self._snapshots.change(held, key) as adapter:
                        there = True
                        await self._engine.shift(job.request_id, adapter, key.version)
            except TinsmithError as error:
                self._stays.failed(str(key), error)
                if there:
                    # It has some of the two, and holds both to its end.
                    return
            else:
                present = key

    async def _update(self, held: Held, key: SnapshotKey, turned: asyncio.Event) -> bool:
        """Waits until all weights of a model are replaced under all that runs; not when its course turns
        meanwhile. Whether they were: who has waited for something older than the newest is not given it."""
        updated = asyncio.create_task(self._snapshots.update(held, key), name=f"update to {key}")
        newer = asyncio.create_task(turned.wait(), name=f"newer than {key}")
        try:
            await asyncio.wait([updated, newer], return_when=asyncio.FIRST_COMPLETED)
            if updated.done():
                updated.result()
            return updated.done()
        finally:
            await cancel_all([updated, newer])


class _Holding:
    """The weights of a job are in the engine meanwhile, unless its course turns before.

    Raises:
        Turned: it has.
        _NotThere: they are not to be had.
    """

    def __init__(self, course: Course, snapshots: Snapshots, key: SnapshotKey | None) -> None:
        self._course = course
        self._use = snapshots.use(key)

    async def __aenter__(self) -> Held:
        try:
            return await self._course.wait(self._use.__aenter__())
        except TinsmithError as error:
            raise _NotThere(error) from error

    async def __aexit__(self, *error: Any) -> None:
        await self._use.__aexit__(*error)


class _NotThere(Exception):
    """Weights are not to be had, for this reason."""

    def __init__(self, reason: TinsmithError) -> None:
        super().__init__(str(reason))
        self.reason = reason
