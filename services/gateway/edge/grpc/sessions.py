"""gRPC: what the service is, what it serves, and sessions."""

from __future__ import annotations

from collections.abc import AsyncIterator

from services.gateway.edge.grpc import convert
from services.gateway.edge.grpc.calls import Calls, Context
from tinsmith.v1 import models_pb2, server_pb2, sessions_pb2


class SessionCalls(Calls):
    """Methods as service.proto describes them."""

    async def GetServerInfo(
        self, request: server_pb2.GetServerInfoRequest, context: Context
    ) -> server_pb2.GetServerInfoResponse:
        self._owner(context)
        models = await self._app.base_models.served()
        return convert.server_info(models, self._app.limits)

    async def ListModels(
        self, request: models_pb2.ListModelsRequest, context: Context
    ) -> models_pb2.ListModelsResponse:
        self._owner(context)
        models = await self._app.base_models.served()
        return models_pb2.ListModelsResponse(
            models=[convert.base_model(model, self._app.limits) for model in models]
        )

    async def GetTokenizer(
        self, request: models_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[models_pb2.GetTokenizerResponse]:
        owner = self._owner(context)
        with self._app.gate.download(owner), self._app.budget.account(owner) as account:
            texts = await self._app.tokenizer_files.of(request.base_model)
            files = {name: text.encode() for name, text in texts.items()}
            account.hold(sum(map(len, files.values())))
            del texts
            for name, data in files.items():
                for start in range(0, len(data), convert.PIECE_BYTES):
                    piece = data[start : start + convert.PIECE_BYTES]
                    yield models_pb2.GetTokenizerResponse(file=name, file_bytes=len(data), data=piece)

    async def CreateSession(
        self, request: sessions_pb2.CreateSessionRequest, context: Context
    ) -> sessions_pb2.CreateSessionResponse:
        owner = self._owner(context)
        key = request.idempotency_key or None
        session_id = await self._app.sessions.create(owner, convert.new_session(request), key)
        return sessions_pb2.CreateSessionResponse(session_id=session_id)

    async def Heartbeat(
        self, request: sessions_pb2.HeartbeatRequest, context: Context
    ) -> sessions_pb2.HeartbeatResponse:
        await self._app.sessions.heartbeat(self._owner(context), request.session_id)
        return sessions_pb2.HeartbeatResponse()

    async def FinishSession(
        self, request: sessions_pb2.FinishSessionRequest, context: Context
    ) -> sessions_pb2.FinishSessionResponse:
        reason = convert.finish_reason(request.reason)
        await self._app.finish_session(self._owner(context), request.session_id, reason, request.detail)
        return sessions_pb2.FinishSessionResponse()
