"""gRPC: sampling sessions and samples."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

from services.gateway.edge.grpc import convert
from services.gateway.edge.grpc.calls import Calls, Context
from services.gateway.edge.grpc.results import patience
from tinsmith.v1 import sampling_pb2

_KEEP_S = 30.0
"""How long a sample may take to end with what it has come to: what a lost gateway had is found in less."""


class SamplingCalls(Calls):
    """Methods as service.proto describes them."""

    async def CreateSamplingSession(
        self, request: sampling_pb2.CreateSamplingSessionRequest, context: Context
    ) -> sampling_pb2.CreateSamplingSessionResponse:
        session_id = await self._app.sampling.open(
            self._owner(context),
            request.session_id,
            convert.ordinal("sampling_session_seq_id", request.sampling_session_seq_id),
            request.base_model or None,
            request.model_path or None,
        )
        return sampling_pb2.CreateSamplingSessionResponse(sampling_session_id=session_id)

    async def GetSamplingSession(
        self, request: sampling_pb2.GetSamplingSessionRequest, context: Context
    ) -> sampling_pb2.GetSamplingSessionResponse:
        found = await self._app.sampling.get(self._owner(context), request.sampling_session_id)
        return sampling_pb2.GetSamplingSessionResponse(
            base_model=found.base_model,
            model_id=found.model_id,
            model_path=found.model_path,
            inflight=found.inflight,
        )

    async def Sample(
        self, request: sampling_pb2.SampleRequest, context: Context
    ) -> sampling_pb2.SampleResponse:
        request_id = await self._app.sampling.sample(self._owner(context), request)
        return sampling_pb2.SampleResponse(request_id=request_id)

    async def StreamSample(
        self, request: sampling_pb2.StreamSampleRequest, context: Context
    ) -> AsyncIterator[sampling_pb2.StreamSampleResponse]:
        told = self._app.sample_streams.tell(self._owner(context), request.sample)
        # It is counted until the first answer only.
        del request
        async with aclosing(told) as parts:
            async for part in parts:
                yield convert.stream_part(part)

    async def CancelSample(
        self, request: sampling_pb2.CancelSampleRequest, context: Context
    ) -> sampling_pb2.CancelSampleResponse:
        owner = self._owner(context)
        if request.keep:
            seconds = patience(_KEEP_S, context.time_remaining())
            await self._app.sampling.keep(owner, request.request_id, seconds)
        else:
            await self._app.sampling.cancel(owner, request.request_id)
        return sampling_pb2.CancelSampleResponse()
