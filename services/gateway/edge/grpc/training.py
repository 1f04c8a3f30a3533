"""gRPC: models and their operations."""

from __future__ import annotations

from services.common.contract import ids, roles
from services.common.contract.errors import InvalidRequest
from services.gateway.edge.grpc import convert
from services.gateway.edge.grpc.calls import Calls, Context
from tinsmith.v1 import checkpoints_pb2, models_pb2, training_pb2


class TrainingCalls(Calls):
    """Methods as service.proto describes them."""

    async def CreateModel(
        self, request: models_pb2.CreateModelRequest, context: Context
    ) -> models_pb2.CreateModelResponse:
        owner = self._owner(context)
        number = convert.ordinal("model_seq_id", request.model_seq_id)
        request_id = await self._app.models.create(
            owner,
            request.session_id,
            number,
            request.base_model,
            convert.adapter(request),
            dict(request.user_metadata),
            roles.from_pb(request.role) if request.role else None,
        )
        model_id = ids.model_id(request.session_id, number)
        return models_pb2.CreateModelResponse(request_id=request_id, model_id=model_id)

    async def CreateModelFromState(
        self, request: models_pb2.CreateModelFromStateRequest, context: Context
    ) -> models_pb2.CreateModelFromStateResponse:
        owner = self._owner(context)
        number = convert.ordinal("model_seq_id", request.model_seq_id)
        request_id = await self._app.models.create_from_state(
            owner,
            request.session_id,
            number,
            request.path,
            request.optimizer,
            request.base_model or None,
            dict(request.user_metadata),
        )
        model_id = ids.model_id(request.session_id, number)
        return models_pb2.CreateModelFromStateResponse(request_id=request_id, model_id=model_id)

    async def GetModelInfo(
        self, request: models_pb2.GetModelInfoRequest, context: Context
    ) -> models_pb2.GetModelInfoResponse:
        record = await self._app.models.current(self._owner(context), request.model_id)
        tokenizer = await self._app.models.tokenizer_of(record)
        last = await self._app.models.last_seq_id(record)
        return models_pb2.GetModelInfoResponse(model=convert.model_info(record, tokenizer), last_seq_id=last)

    async def UnloadModel(
        self, request: models_pb2.UnloadModelRequest, context: Context
    ) -> models_pb2.UnloadModelResponse:
        owner = self._owner(context)
        if request.seq_id:
            request_id = await self._app.models.unload(owner, request.model_id, request.seq_id)
        else:
            request_id = await self._app.exports.unload(owner, request.model_id)
        return models_pb2.UnloadModelResponse(request_id=request_id)

    async def ForwardBackward(
        self, request: training_pb2.ForwardBackwardRequest, context: Context
    ) -> training_pb2.ForwardBackwardResponse:
        request_id = await self._app.models.forward_backward(
            self._owner(context),
            request.model_id,
            request.seq_id,
            request.ByteSize(),
            request,
            lambda base: convert.forward_backward(request),
        )
        return training_pb2.ForwardBackwardResponse(request_id=request_id)

    async def OptimStep(
        self, request: training_pb2.OptimStepRequest, context: Context
    ) -> training_pb2.OptimStepResponse:
        models, owner = self._app.models, self._owner(context)
        try:
            adam = convert.adam(request)
        except InvalidRequest as error:
            request_id = await models.refuse(owner, request.model_id, request.seq_id, error)
        else:
            request_id = await models.optim_step(owner, request.model_id, request.seq_id, adam)
        return training_pb2.OptimStepResponse(request_id=request_id)

    async def SaveState(
        self, request: checkpoints_pb2.SaveStateRequest, context: Context
    ) -> checkpoints_pb2.SaveStateResponse:
        request_id = await self._app.saves.save_state(
            self._owner(context),
            request.model_id,
            request.seq_id,
            request.name or None,
            request.overwrite,
            convert.save_options(request),
        )
        return checkpoints_pb2.SaveStateResponse(request_id=request_id)

    async def LoadState(
        self, request: checkpoints_pb2.LoadStateRequest, context: Context
    ) -> checkpoints_pb2.LoadStateResponse:
        request_id = await self._app.saves.load_state(
            self._owner(context), request.model_id, request.seq_id, request.path, request.optimizer
        )
        return checkpoints_pb2.LoadStateResponse(request_id=request_id)

    async def SaveExternal(
        self, request: checkpoints_pb2.SaveExternalRequest, context: Context
    ) -> checkpoints_pb2.SaveExternalResponse:
        request_id = await self._app.exports.save(
            self._owner(context),
            request.model_id,
            request.seq_id,
            request.name or None,
            request.ttl_seconds or None,
            list(request.age_recipients),
        )
        return checkpoints_pb2.SaveExternalResponse(request_id=request_id)

    async def SaveForSampler(
        self, request: checkpoints_pb2.SaveForSamplerRequest, context: Context
    ) -> checkpoints_pb2.SaveForSamplerResponse:
        saves, owner = self._app.saves, self._owner(context)
        model_id, seq_id = request.model_id, request.seq_id
        try:
            convert.check_save_for_sampler(request)
        except InvalidRequest as error:
            request_id = await self._app.models.refuse(owner, model_id, seq_id, error)
            return checkpoints_pb2.SaveForSamplerResponse(request_id=request_id)
        if request.name:
            options = convert.save_options(request)
            request_id = await saves.save_for_sampler(owner, model_id, seq_id, request.name, options)
            return checkpoints_pb2.SaveForSamplerResponse(request_id=request_id)
        request_id, session = await saves.save_for_sampling_session(
            owner, model_id, seq_id, request.sampling_session_seq_id, request.inflight, told=True
        )
        return checkpoints_pb2.SaveForSamplerResponse(request_id=request_id, sampling_session_id=session)
