"""The gRPC servicer of a sampler: admission, then the engine.

Invariant: a request that was refused, failed or was cancelled holds nothing afterwards: no queue
place, no snapshot, no engine request.
"""

from __future__ import annotations

from typing import Any, Protocol

from services.common.contract.errors import InvalidRequest, Unavailable
from services.common.process import failpoints
from services.sampler import convert
from services.sampler.engine.sampling import Limits, SampleJob, SampleOutput, admit, check
from services.sampler.engine.snapshot_key import Adapter
from services.sampler.snapshots.snapshots import Snapshots
from tinsmith.v1 import sampler_pb2, sampler_pb2_grpc


class SamplingEngine(Protocol):
    """What this needs of an engine."""

    limits: Limits

    async def sample(self, job: SampleJob, adapter: Adapter | None) -> SampleOutput: ...


class SamplerService(sampler_pb2_grpc.SamplerServiceServicer):
    """Serves SamplerService."""

    def __init__(self, engine: SamplingEngine, snapshots: Snapshots) -> None:
        self._engine = engine
        self._snapshots = snapshots
        self._requests = 0
        self._sequences = 0
        self.draining = False
        """New samples and transfers are refused; running ones go on."""

    async def Sample(self, request: sampler_pb2.SampleRequest, context: Any) -> sampler_pb2.SampleResponse:
        self._refuse_when_draining()
        try:
            job = convert.sample_job_from_pb(request)
            check(job, self._engine.limits)
        except InvalidRequest as error:
            return convert.error_to_pb(error)
        admit(self._sequences, job.num_samples, self._engine.limits)
        self._requests += 1
        self._sequences += job.num_samples
        try:
            output = await self._sample(job)
            await failpoints.reach("sampler.before_reply")
            return convert.output_to_pb(output)
        except InvalidRequest as error:
            return convert.error_to_pb(error)
        finally:
            self._requests -= 1
            self._sequences -= job.num_samples

    async def _sample(self, job: SampleJob) -> SampleOutput:
        async with self._snapshots.use(job.snapshot) as adapter:
            return await self._engine.sample(job, adapter)

    async def JoinGroup(
        self, request: sampler_pb2.JoinGroupRequest, context: Any
    ) -> sampler_pb2.JoinGroupResponse:
        self._refuse_when_draining()
        if request.epoch < 1 or request.first_rank < 1 or request.timeout_seconds <= 0:
            raise InvalidRequest("epoch, first_rank and timeout_seconds must be above 0")
        await self._snapshots.join_group(
            request.epoch,
            request.first_rank,
            request.world_size,
            convert.medium_from_pb(request.medium),
            request.timeout_seconds,
        )
        return sampler_pb2.JoinGroupResponse()

    async def ReceiveSnapshot(
        self, request: sampler_pb2.ReceiveSnapshotRequest, context: Any
    ) -> sampler_pb2.ReceiveSnapshotResponse:
        self._refuse_when_draining()
        await self._snapshots.receive(convert.incoming_from_pb(request))
        return sampler_pb2.ReceiveSnapshotResponse()

    async def GetSamplerStatus(
        self, request: sampler_pb2.GetSamplerStatusRequest, context: Any
    ) -> sampler_pb2.GetSamplerStatusResponse:
        return sampler_pb2.GetSamplerStatusResponse(
            running=self._requests,
            resident=[convert.snapshot_to_pb(key) for key in self._snapshots.resident()],
            group_epoch=self._snapshots.group_epoch,
            weights=convert.snapshot_to_pb(weights) if (weights := self._snapshots.weights) else None,
            waiting=self._snapshots.waiting,
        )

    def _refuse_when_draining(self) -> None:
        if self.draining:
            raise Unavailable("this sampler is draining; send the request to another one")
