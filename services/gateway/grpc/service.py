"""The public gRPC service over the application layer.

Invariant: every method knows the caller before it does anything; errors are typed and mapped to
statuses by `services.common.rpc`.
"""

from __future__ import annotations

from typing import TypeAlias

import grpc.aio
from redis.exceptions import RedisError

from services.common import ids, rpc
from services.common.errors import InvalidRequest, Unavailable
from services.gateway.app import Application
from services.gateway.grpc import convert
from services.gateway.limits import MAX_GET_RESULT_SECONDS
from services.gateway.models import SaveOptions
from tinsmith.v1 import tinsmith_pb2, tinsmith_pb2_grpc

Context: TypeAlias = grpc.aio.ServicerContext


class TinsmithService(tinsmith_pb2_grpc.TinsmithServiceServicer):
    """Methods as tinsmith.proto describes them."""

    def __init__(self, application: Application) -> None:
        self._app = application

    def _owner(self, context: Context) -> str:
        for key, value in context.invocation_metadata() or ():
            if key == "x-api-key":
                return self._app.keys.owner_of(value if isinstance(value, str) else value.decode())
        return self._app.keys.owner_of(None)

    async def ListModels(
        self, request: tinsmith_pb2.ListModelsRequest, context: Context
    ) -> tinsmith_pb2.ListModelsResponse:
        self._owner(context)
        models = await self._app.catalog.live()
        return tinsmith_pb2.ListModelsResponse(models=[convert.base_model(model) for model in models])

    async def CreateSession(
        self, request: tinsmith_pb2.CreateSessionRequest, context: Context
    ) -> tinsmith_pb2.CreateSessionResponse:
        owner = self._owner(context)
        session_id = await self._app.sessions.create(owner, convert.new_session(request), None)
        return tinsmith_pb2.CreateSessionResponse(session_id=session_id)

    async def CreateModel(
        self, request: tinsmith_pb2.CreateModelRequest, context: Context
    ) -> tinsmith_pb2.CreateModelResponse:
        owner = self._owner(context)
        number = convert.ordinal("model_seq_id", request.model_seq_id)
        request_id = await self._app.models.create(
            owner, request.session_id, number, request.base_model, request.lora
        )
        model_id = ids.model_id(request.session_id, number)
        return tinsmith_pb2.CreateModelResponse(request_id=request_id, model_id=model_id)

    async def ForwardBackward(
        self, request: tinsmith_pb2.ForwardBackwardRequest, context: Context
    ) -> tinsmith_pb2.ForwardBackwardResponse:
        request_id = await self._app.models.forward_backward(
            self._owner(context),
            request.model_id,
            request.seq_id,
            request.ByteSize(),
            lambda: convert.forward_backward(request),
        )
        return tinsmith_pb2.ForwardBackwardResponse(request_id=request_id)

    async def OptimStep(
        self, request: tinsmith_pb2.OptimStepRequest, context: Context
    ) -> tinsmith_pb2.OptimStepResponse:
        request_id = await self._app.models.optim_step(
            self._owner(context), request.model_id, request.seq_id, lambda: convert.adam(request)
        )
        return tinsmith_pb2.OptimStepResponse(request_id=request_id)

    async def SaveForSampler(
        self, request: tinsmith_pb2.SaveForSamplerRequest, context: Context
    ) -> tinsmith_pb2.SaveForSamplerResponse:
        owner, model_id, seq_id = self._owner(context), request.model_id, request.seq_id
        if request.name:
            request_id = await self._app.models.save_for_sampler(
                owner, model_id, seq_id, request.name, SaveOptions()
            )
            return tinsmith_pb2.SaveForSamplerResponse(request_id=request_id)
        number = convert.ordinal("sampling_session_seq_id", request.sampling_session_seq_id)
        request_id, session = await self._app.models.save_for_sampling_session(
            owner, model_id, seq_id, number
        )
        return tinsmith_pb2.SaveForSamplerResponse(request_id=request_id, sampling_session_id=session)

    async def CreateSamplingSession(
        self, request: tinsmith_pb2.CreateSamplingSessionRequest, context: Context
    ) -> tinsmith_pb2.CreateSamplingSessionResponse:
        session_id = await self._app.sampling.open(
            self._owner(context),
            request.session_id,
            convert.ordinal("sampling_session_seq_id", request.sampling_session_seq_id),
            request.base_model or None,
            request.model_path or None,
        )
        return tinsmith_pb2.CreateSamplingSessionResponse(sampling_session_id=session_id)

    async def Sample(
        self, request: tinsmith_pb2.TinsmithServiceSampleRequest, context: Context
    ) -> tinsmith_pb2.TinsmithServiceSampleResponse:
        request_id = await self._app.sampling.sample(self._owner(context), request)
        return tinsmith_pb2.TinsmithServiceSampleResponse(request_id=request_id)

    async def GetResult(
        self, request: tinsmith_pb2.GetResultRequest, context: Context
    ) -> tinsmith_pb2.GetResultResponse:
        owner = self._owner(context)
        if not 0 <= request.timeout_seconds <= MAX_GET_RESULT_SECONDS:
            raise InvalidRequest(f"timeout_seconds must be 0 to {MAX_GET_RESULT_SECONDS:g}")
        try:
            view = await self._app.wait_result(owner, request.request_id, request.timeout_seconds)
        except RedisError as error:
            raise Unavailable("the state store cannot be reached; try again in a moment") from error
        return convert.result(view)


async def serve(application: Application, bind: str) -> rpc.RpcServer:
    """Serves the public service on "host:port", which other gateways of this machine may share.

    Raises:
        Unavailable: the address cannot be bound.
    """
    name = tinsmith_pb2.DESCRIPTOR.services_by_name["TinsmithService"].full_name
    add = tinsmith_pb2_grpc.add_TinsmithServiceServicer_to_server
    return await rpc.serve([(add, TinsmithService(application), name)], bind, reuse_port=True)
