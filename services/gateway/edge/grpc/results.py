"""gRPC: the results of all requests.

Invariant: a wait ends before its call's deadline, so that its client hears how far the work is.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack, aclosing

from services.common.contract import errors
from services.common.contract.errors import InvalidRequest
from services.gateway.access.limits import MAX_GET_RESULT_SECONDS, MAX_WATCH_SECONDS
from services.gateway.edge.grpc import convert
from services.gateway.edge.grpc.calls import Calls, Context
from tinsmith.v1 import results_pb2

_ANSWER_SHARE = 0.1
_ANSWER_S = 3.0
"""An answer has a tenth of the time that its call has left to get there, and at most so long."""


class ResultCalls(Calls):
    """Methods as service.proto describes them."""

    async def GetResult(
        self, request: results_pb2.GetResultRequest, context: Context
    ) -> results_pb2.GetResultResponse:
        owner = self._owner(context)
        asked = request.timeout_seconds if request.HasField("timeout_seconds") else None
        seconds = patience(asked, context.time_remaining())
        held = ExitStack()
        # Until the client has it.
        context.add_done_callback(lambda _: held.close())
        return convert.result(await self._app.wait_result(owner, request.request_id, seconds, held))

    async def ReadResults(
        self, request: results_pb2.ReadResultsRequest, context: Context
    ) -> AsyncIterator[results_pb2.ReadResultsResponse]:
        owner = self._owner(context)
        convert.check_request_ids(request.request_ids)
        asked = request.timeout_seconds if request.HasField("timeout_seconds") else None
        seconds = patience(asked, context.time_remaining())
        async with aclosing(self._app.read_results(owner, request.request_ids, seconds)) as found:
            async for request_id, result in found:
                if isinstance(result, bytes):
                    for start in range(0, max(1, len(result)), convert.PIECE_BYTES):
                        yield convert.result_piece(request_id, result, start)
                else:
                    error = errors.to_pb(result)
                    yield results_pb2.ReadResultsResponse(request_id=request_id, error=error)
                # Its memory counts until the next is asked for.
                del result

    async def WatchSamples(
        self, request: results_pb2.WatchSamplesRequest, context: Context
    ) -> AsyncIterator[results_pb2.WatchSamplesResponse]:
        owner = self._owner(context)
        target, seconds = convert.watched(request), before_end(MAX_WATCH_SECONDS, context.time_remaining())
        async with aclosing(self._app.watch_samples(owner, target, request.cursor, seconds)) as found:
            async for sample, result in found:
                # The stream may be older than the end of its key.
                self._owner(context)
                if isinstance(result, bytes):
                    for start in range(0, max(1, len(result)), convert.PIECE_BYTES):
                        yield convert.watched_piece(sample, result, start)
                else:
                    yield convert.watched_error(sample, result)
                # Its memory counts until the next is asked for.
                del result

    async def AcknowledgeResults(
        self, request: results_pb2.AcknowledgeResultsRequest, context: Context
    ) -> results_pb2.AcknowledgeResultsResponse:
        owner = self._owner(context)
        convert.check_request_ids(request.request_ids)
        await self._app.acknowledge_results(owner, request.request_ids)
        return results_pb2.AcknowledgeResultsResponse()


def patience(asked: float | None, left: float | None) -> float:
    """Seconds to wait for a result.

    Args:
        asked: what the request says; None: nothing.
        left: until the call's deadline; None: it has none.

    Raises:
        InvalidRequest: more is asked for than one call waits.
    """
    if asked is not None and not 0 <= asked <= MAX_GET_RESULT_SECONDS:
        message = f"timeout_seconds must be 0 to {MAX_GET_RESULT_SECONDS:g}"
        raise InvalidRequest(message, field="timeout_seconds")
    return before_end(MAX_GET_RESULT_SECONDS if asked is None else asked, left)


def before_end(seconds: float, left: float | None) -> float:
    """So many seconds, or fewer when a call with so much time left is to be answered in time."""
    if left is None:
        return seconds
    return max(0.0, min(seconds, left - min(_ANSWER_S, _ANSWER_SHARE * left)))
