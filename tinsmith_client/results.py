"""Results of accepted work.

Invariant: a result is read in pieces, so it may be larger than any message; a read that breaks off is
repeated.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from tinsmith.v1 import results_pb2
from tinsmith_client.calls import Calls
from tinsmith_client.errors import CallFailed, RequestFailed

T = TypeVar("T")

_WAIT_S = 50.0
_READ_S = 600.0


class Pending(Generic[T]):
    """Work that is accepted. Its effect is certain; its result is there in time.

    Attributes:
        request_id: names it; see `Client.pending`.
    """

    def __init__(
        self, calls: Calls, request_id: str, pick: Callable[[results_pb2.OperationResult], T]
    ) -> None:
        self._calls = calls
        self._pick = pick
        self._known: results_pb2.OperationResult | None = None
        self.request_id = request_id

    def result(self, timeout: float | None = None) -> T:
        """Waits for the result.

        Args:
            timeout: seconds; None: for ever.

        Raises:
            TimeoutError: it is not there yet. Ask again.
            RequestFailed: the work failed; or there is no such request or its result expired, with the code
                not_found or gone.
            Unreachable: the service cannot be asked.
        """
        if self._known is None:
            self._known = self._wait(timeout)
        if self._known.WhichOneof("kind") == "error":
            raise RequestFailed(self._known.error)
        return self._pick(self._known)

    def _wait(self, timeout: float | None) -> results_pb2.OperationResult:
        end = None if timeout is None else time.monotonic() + timeout
        for attempt in self._calls.attempts():
            left = _WAIT_S if end is None else max(0.0, min(_WAIT_S, end - time.monotonic()))
            try:
                found = self._read(left)
            except CallFailed as error:
                attempt.failed(error)
                found = None
            if found is not None:
                return found
            if end is not None and time.monotonic() >= end:
                raise TimeoutError(f"{self.request_id} has no result after {timeout:g} s")
        raise AssertionError("attempts end with an error")

    def _read(self, seconds: float) -> results_pb2.OperationResult | None:
        """The result; None: not after so many seconds."""
        request = results_pb2.ReadResultsRequest(request_ids=[self.request_id], timeout_seconds=seconds)
        data = bytearray()
        for answer in self._calls.stream("ReadResults", request, _READ_S):
            if answer.HasField("error"):
                return results_pb2.OperationResult(error=answer.error)
            data += answer.piece.data
            if len(data) == answer.piece.total_bytes:
                return results_pb2.OperationResult.FromString(bytes(data))
        return None


def anything(result: results_pb2.OperationResult) -> Any:
    """The result of a request whatever its kind."""
    return getattr(result, result.WhichOneof("kind") or "error")
