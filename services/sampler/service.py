"""The gRPC servicer of a sampler.

Invariant: it decides nothing; a message becomes plain data, the rooms below do what it asks, and what they
answer or refuse becomes a message.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from services.common.contract.errors import Draining, InvalidRequest
from services.common.process import failpoints
from services.common.process.tasks import cancel_all
from services.common.telemetry import subject
from services.sampler import convert
from services.sampler.convert import Answer
from services.sampler.engine.sampling import Tell
from services.sampler.requests.admission import Admission
from services.sampler.requests.generations import Generations
from services.sampler.requests.new_tokens import TokenStream
from services.sampler.requests.samples import Samples
from services.sampler.requests.suspects import GivenUp
from services.sampler.snapshots.snapshots import Snapshots
from tinsmith.internal.v1 import sampler_pb2, sampler_pb2_grpc

if TYPE_CHECKING:
    from services.sampler.engine.engine import Engine


class SamplerService(sampler_pb2_grpc.SamplerServiceServicer):
    """Serves SamplerService."""

    def __init__(
        self,
        engine: Engine,
        generations: Generations[Answer],
        samples: Samples,
        admission: Admission,
        snapshots: Snapshots,
    ) -> None:
        self._engine = engine
        self._generations = generations
        self._samples = samples
        self._admission = admission
        self._snapshots = snapshots
        self.draining = False
        """New samples and transfers are refused; running ones go on."""

    async def Sample(self, request: sampler_pb2.SampleRequest, context: Any) -> sampler_pb2.SampleResponse:
        name = request.request_id
        subject.note(request.origin.owner, request.snapshot.model_id, name)
        if not self._generations.knows(name):
            self._refuse_when_draining()
        self._samples.move(name, convert.snapshot_from_pb(request.snapshot))
        answer = await self._generations.answer(
            name, convert.digest_of(request), lambda: self._generate(request), request.wait_seconds or None
        )
        await failpoints.reach("sampler.before_reply")
        return answer.response if answer else convert.progress_to_pb(self._engine.tokens_of(name))

    async def StreamSample(
        self, request: sampler_pb2.StreamSampleRequest, context: Any
    ) -> AsyncIterator[sampler_pb2.StreamSampleResponse]:
        sample, stream = request.sample, TokenStream()
        subject.note(sample.origin.owner, sample.snapshot.model_id, sample.request_id)
        if not self._generations.knows(sample.request_id):
            self._refuse_when_draining()
        self._samples.move(sample.request_id, convert.snapshot_from_pb(sample.snapshot))
        answer = asyncio.ensure_future(
            self._generations.answer(
                sample.request_id, convert.digest_of(sample), lambda: self._generate(sample, stream.tell)
            )
        )
        try:
            async for new in stream.until(answer, sample.wait_seconds or None):
                yield convert.new_tokens_to_pb(new)
            last = await answer
            yield sampler_pb2.StreamSampleResponse(last=last.response if last else None)
        finally:
            # The generation may go on for another caller, and tells this stream to its end.
            stream.close()
            await cancel_all([answer])

    async def _generate(self, request: sampler_pb2.SampleRequest, tell: Tell | None = None) -> Answer:
        try:
            return convert.answer(await self._samples.run(convert.sample_job_from_pb(request), tell))
        except (InvalidRequest, GivenUp) as error:
            return convert.refusal(error)

    async def EndSample(
        self, request: sampler_pb2.EndSampleRequest, context: Any
    ) -> sampler_pb2.EndSampleResponse:
        end = self._samples.end if request.keep else self._generations.give_up
        return sampler_pb2.EndSampleResponse(known=end(request.request_id))

    async def MoveSample(
        self, request: sampler_pb2.MoveSampleRequest, context: Any
    ) -> sampler_pb2.MoveSampleResponse:
        known = self._samples.move(request.request_id, convert.snapshot_from_pb(request.snapshot))
        return sampler_pb2.MoveSampleResponse(known=known)

    async def FindSample(
        self, request: sampler_pb2.FindSampleRequest, context: Any
    ) -> sampler_pb2.FindSampleResponse:
        return sampler_pb2.FindSampleResponse(known=self._generations.knows(request.request_id))

    async def GetTokenizer(
        self, request: sampler_pb2.GetTokenizerRequest, context: Any
    ) -> sampler_pb2.GetTokenizerResponse:
        found = await asyncio.to_thread(self._engine.tokenizer)
        return sampler_pb2.GetTokenizerResponse(
            tokenizer_json=found.tokenizer_json,
            chat_template=found.chat_template,
            special_tokens=found.special_tokens,
        )

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
        subject.note(model_id=request.snapshot.model_id)
        await self._snapshots.receive(convert.incoming_from_pb(request))
        return sampler_pb2.ReceiveSnapshotResponse()

    async def GetSamplerStatus(
        self, request: sampler_pb2.GetSamplerStatusRequest, context: Any
    ) -> sampler_pb2.GetSamplerStatusResponse:
        return sampler_pb2.GetSamplerStatusResponse(
            running=self._samples.running,
            resident=[convert.snapshot_to_pb(key) for key in self._snapshots.resident()],
            group_epoch=self._snapshots.group_epoch,
            weights=convert.snapshot_to_pb(weights) if (weights := self._snapshots.weights) else None,
            waiting=self._snapshots.waiting,
            sequences=self._admission.taken,
            waiting_sequences=self._admission.waiting,
            generated_tokens=self._engine.generated_tokens,
        )

    def _refuse_when_draining(self) -> None:
        if self.draining:
            raise Draining("this sampler is draining; send the request to another one")
