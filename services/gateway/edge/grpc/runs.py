"""gRPC: sessions and training runs, looked at afterwards."""

from __future__ import annotations

from services.gateway.edge.grpc import convert, paging, session_search
from services.gateway.edge.grpc.calls import Calls, Context
from services.gateway.training.runs import Run
from tinsmith.v1 import runs_pb2, sessions_pb2

_PAGE = 20


class RunCalls(Calls):
    """Methods as service.proto describes them."""

    async def GetSession(
        self, request: sessions_pb2.GetSessionRequest, context: Context
    ) -> sessions_pb2.GetSessionResponse:
        found = await self._app.session_search.details(self._owner(context), request.session_id)
        return sessions_pb2.GetSessionResponse(session=convert.session(found))

    async def ListSessions(
        self, request: sessions_pb2.ListSessionsRequest, context: Context
    ) -> sessions_pb2.ListSessionsResponse:
        found = await self._app.session_search.after(
            self._owner(context), request.page_size or _PAGE, paging.cursor_of(request.page_token)
        )
        return sessions_pb2.ListSessionsResponse(
            session_ids=found.names, total=found.total, next_page_token=paging.token_of(found.next)
        )

    async def SearchSessions(
        self, request: sessions_pb2.SearchSessionsRequest, context: Context
    ) -> sessions_pb2.SearchSessionsResponse:
        owner = self._owner(context)
        page = await self._app.session_search.search(owner, session_search.query(request))
        return session_search.response(page)

    async def SetSessionProject(
        self, request: sessions_pb2.SetSessionProjectRequest, context: Context
    ) -> sessions_pb2.SetSessionProjectResponse:
        owner = self._owner(context)
        await self._app.session_search.assign_project(owner, request.session_id, request.project_id)
        return sessions_pb2.SetSessionProjectResponse()

    async def GetTrainingRun(
        self, request: runs_pb2.GetTrainingRunRequest, context: Context
    ) -> runs_pb2.GetTrainingRunResponse:
        owner = self._owner(context)
        run = await self._app.runs.get(owner, request.training_run_id, request.accessible)
        return runs_pb2.GetTrainingRunResponse(training_run=await self._described(run))

    async def ListTrainingRuns(
        self, request: runs_pb2.ListTrainingRunsRequest, context: Context
    ) -> runs_pb2.ListTrainingRunsResponse:
        owner, cursor = self._owner(context), paging.cursor_of(request.page_token)
        page = await self._app.runs.after(
            owner, request.page_size or _PAGE, cursor, request.project_id or None
        )
        return runs_pb2.ListTrainingRunsResponse(
            training_runs=[await self._described(run) for run in page.runs],
            total=page.total,
            next_page_token=paging.token_of(page.next),
        )

    async def _described(self, run: Run) -> runs_pb2.TrainingRun:
        return convert.training_run(run, await self._app.models.tokenizer_of(run.model))
