"""gRPC: checkpoints, and the files of exports."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

from services.common.contract import ids
from services.gateway.edge.grpc import convert, paging
from services.gateway.edge.grpc.calls import Calls, Context
from tinsmith.v1 import checkpoints_pb2

_PAGE = 100


class CheckpointCalls(Calls):
    """Methods as service.proto describes them."""

    async def ListCheckpoints(
        self, request: checkpoints_pb2.ListCheckpointsRequest, context: Context
    ) -> checkpoints_pb2.ListCheckpointsResponse:
        owner, most = self._owner(context), request.page_size or _PAGE
        cursor = paging.cursor_of(request.page_token)
        if request.model_id:
            page = await self._app.checkpoints.of_model_after(owner, request.model_id, most, cursor)
        else:
            page = await self._app.checkpoints.after(owner, most, cursor)
        return checkpoints_pb2.ListCheckpointsResponse(
            checkpoints=[convert.checkpoint(record) for record in page.records],
            total=page.total,
            next_page_token=paging.token_of(page.next),
        )

    async def GetCheckpoint(
        self, request: checkpoints_pb2.GetCheckpointRequest, context: Context
    ) -> checkpoints_pb2.GetCheckpointResponse:
        name = ids.parse_tinker_path(request.path)
        record = await self._app.checkpoints.readable(self._owner(context), *name)
        return checkpoints_pb2.GetCheckpointResponse(checkpoint=convert.checkpoint(record))

    async def DeleteCheckpoint(
        self, request: checkpoints_pb2.DeleteCheckpointRequest, context: Context
    ) -> checkpoints_pb2.DeleteCheckpointResponse:
        owner = self._owner(context)
        await self._app.checkpoints.delete_if_there(owner, *ids.parse_tinker_path(request.path))
        return checkpoints_pb2.DeleteCheckpointResponse()

    async def SetCheckpointTtl(
        self, request: checkpoints_pb2.SetCheckpointTtlRequest, context: Context
    ) -> checkpoints_pb2.SetCheckpointTtlResponse:
        owner, name = self._owner(context), ids.parse_tinker_path(request.path)
        await self._app.checkpoints.set_ttl(owner, *name, request.ttl_seconds or None)
        return checkpoints_pb2.SetCheckpointTtlResponse()

    async def PublishCheckpoint(
        self, request: checkpoints_pb2.PublishCheckpointRequest, context: Context
    ) -> checkpoints_pb2.PublishCheckpointResponse:
        owner, name = self._owner(context), ids.parse_tinker_path(request.path)
        await self._app.checkpoints.set_public(owner, *name, public=True)
        return checkpoints_pb2.PublishCheckpointResponse()

    async def UnpublishCheckpoint(
        self, request: checkpoints_pb2.UnpublishCheckpointRequest, context: Context
    ) -> checkpoints_pb2.UnpublishCheckpointResponse:
        owner, name = self._owner(context), ids.parse_tinker_path(request.path)
        await self._app.checkpoints.set_public(owner, *name, public=False)
        return checkpoints_pb2.UnpublishCheckpointResponse()

    async def ReadExternalWeights(
        self, request: checkpoints_pb2.ReadExternalWeightsRequest, context: Context
    ) -> AsyncIterator[checkpoints_pb2.ReadExternalWeightsResponse]:
        owner, name = self._owner(context), ids.parse_tinker_path(request.path)
        async with aclosing(self._app.downloads.read(owner, *name)) as files:
            async for file, download in files:
                async with aclosing(download.pieces()) as pieces:
                    async for piece in pieces:
                        yield checkpoints_pb2.ReadExternalWeightsResponse(
                            file=file, file_bytes=download.size, data=piece
                        )
