"""Results of accepted work.

Invariant: a result is read in pieces, so it may be larger than any message; a read that breaks off is
repeated. What `as_completed` has read counts no more for what the API key may keep. Who waits for work that
does not go on is told why, by a warning of the logger `tinsmith_client`, once for each reason.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from tinsmith.v1 import results_pb2
from tinsmith_client.calls import Calls
from tinsmith_client.errors import CallFailed, RequestFailed

T = TypeVar("T")

log = logging.getLogger("tinsmith_client")

_WAIT_S = 50.0
_SILENT_S = 5.0
"""Without a result for so long, the reason is asked for; then after each wait."""
_ASKED_S = 10.0
_READ_S = 600.0
_AT_ONCE = 1024
"""Most results that one call may ask for."""
_TURN_S = 2.0
"""How long so many are waited for while there are others."""
_LET_GO_S = 5.0
_MOMENT_S = 0.5


class Pending(Generic[T]):
    """Work that is accepted. Its effect is certain; its result is there in time.

    Attributes:
        request_id: names it; see `Client.pending`.
    """

    def __init__(
        self,
        calls: Calls,
        request_id: str,
        pick: Callable[[results_pb2.OperationResult], T],
        known: results_pb2.OperationResult | None = None,
    ) -> None:
        self._calls = calls
        self._pick = pick
        self._known = known
        self.request_id = request_id

    def result(self, timeout: float | None = None) -> T:
        """Waits for the result.

        Args:
            timeout: seconds; None: for ever.

        Raises:
            TimeoutError: it is not there yet; after some seconds it says why. Ask again.
            RequestFailed: the work failed; or there is no such request or its result expired, with the code
                not_found or gone.
            Unreachable: the service cannot be asked.
        """
        if self._known is None:
            self._known = self._wait(timeout)
        if self._known.WhichOneof("kind") == "error":
            raise RequestFailed(self._known.error)
        return self._pick(self._known)

    def waiting_for(self) -> str:
        """Why the work does not go on at present; empty when it does, is done, or nobody could be asked."""
        return self._reason(_ASKED_S) or ""

    def _reason(self, seconds: float) -> str | None:
        """As `waiting_for`; None: nobody answered within so many seconds."""
        request = results_pb2.GetResultRequest(request_id=self.request_id, timeout_seconds=0)
        with contextlib.suppress(CallFailed):
            return str(self._calls.once("GetResult", request, seconds).waiting_for)
        return None

    def _wait(self, timeout: float | None) -> results_pb2.OperationResult:
        end = math.inf if timeout is None else time.monotonic() + timeout
        silence = _Silence(end)
        for attempt in self._calls.attempts():
            began, left = time.monotonic(), silence.left()
            try:
                found = self._read(left)
                if found is not None:
                    return found
                silence.goes_on(self)
            except CallFailed as error:
                attempt.failed(error)
            if time.monotonic() >= end:
                raise TimeoutError(f"{self.request_id} has no result after {timeout:g} s{silence.why}")
            _rest(began, left)
        raise AssertionError("attempts end with an error")

    def _read(self, seconds: float) -> results_pb2.OperationResult | None:
        """The result; None: not after so many seconds."""
        return next((result for _, result, _ in _read(self._calls, [self.request_id], seconds)), None)


def as_completed(pending: Iterable[Pending[T]], timeout: float | None = None) -> Iterator[Pending[T]]:
    """Each as soon as its result is there, when `result` returns or raises at once. All are waited for with
    one call, and what was read is let go: the service keeps it for another minute.

    Args:
        pending: of one client.
        timeout: seconds for all of them; None: for ever.

    Raises:
        TimeoutError: not all are there yet. Ask again for the others.
        Unreachable: while iterating: the service cannot be asked.
    """
    end = math.inf if timeout is None else time.monotonic() + timeout
    left: dict[str, list[Pending[T]]] = {}
    for one in pending:
        if one._known is not None:
            yield one
        else:
            left.setdefault(one.request_id, []).append(one)
    if not left:
        return
    calls = next(iter(left.values()))[0]._calls
    silence = _Silence(end)
    for attempt in calls.attempts():
        asked = list(left)[:_AT_ONCE]
        seconds = silence.left() if len(left) <= _AT_ONCE else min(_TURN_S, silence.left())
        had: list[str] = []
        began, number = time.monotonic(), len(left)
        try:
            for request_id, result, is_kept in _read(calls, asked, seconds):
                attempt.went_well()
                if is_kept:
                    had.append(request_id)
                for one in left.pop(request_id):
                    one._known = result
                    yield one
        except CallFailed as error:
            attempt.failed(error)
        finally:
            let_go(calls, had)
        if not left:
            return
        if len(left) < number:
            silence = _Silence(end)
        elif attempt.error is None:
            silence.goes_on(next(iter(left.values()))[0])
        if time.monotonic() >= end:
            raise TimeoutError(f"{len(left)} requests have no result after {timeout:g} s{silence.why}")
        if len(left) == number:
            _rest(began, seconds)
        for request_id in asked:
            # Those that were asked for wait behind the others.
            if request_id in left:
                left[request_id] = left.pop(request_id)


class _Silence:
    """In which nothing comes: why is asked for after a while, and then now and again.

    Args:
        end: until when results are waited for, by `time.monotonic`.

    Attributes:
        why: nothing came, as the end of a sentence.
    """

    def __init__(self, end: float) -> None:
        self.why = ""
        self._end = end
        self._ask_at = time.monotonic() + _SILENT_S

    def left(self) -> float:
        """Seconds to wait until there is something else to do."""
        return max(0.0, min(self._ask_at, self._end) - time.monotonic())

    def goes_on(self, one: Pending[Any]) -> None:
        """Nothing came yet. Tells, when it is time to, what one of those that are waited for waits for."""
        seconds = min(_ASKED_S, self._end - time.monotonic())
        if time.monotonic() < self._ask_at or seconds <= 0:
            return
        self._ask_at = time.monotonic() + _WAIT_S
        reason = one._reason(seconds)
        if reason is None:
            return
        why = reason and f": {reason}"
        if why and why != self.why:
            log.warning("%s waits%s", one.request_id, why)
        self.why = why


def let_go(calls: Calls, request_ids: list[str]) -> None:
    """Has the service keep results no longer, which goes well, or they go later by themselves."""
    if request_ids:
        with contextlib.suppress(CallFailed):
            request = results_pb2.AcknowledgeResultsRequest(request_ids=request_ids)
            calls.once("AcknowledgeResults", request, _LET_GO_S)


def _rest(began: float, asked: float) -> None:
    """A service that shuts down answers before the time that it was asked to wait, with nothing: in a moment
    another one answers."""
    if time.monotonic() - began < min(asked, _MOMENT_S):
        time.sleep(_MOMENT_S)


def _read(
    calls: Calls, request_ids: list[str], seconds: float
) -> Iterator[tuple[str, results_pb2.OperationResult, bool]]:
    """Results as they come, of requests that have them within so many seconds, and whether the service keeps
    them: it keeps nothing of a request that it does not know."""
    request = results_pb2.ReadResultsRequest(request_ids=request_ids, timeout_seconds=seconds)
    data = bytearray()
    for answer in calls.stream("ReadResults", request, _READ_S):
        if answer.HasField("error"):
            yield answer.request_id, results_pb2.OperationResult(error=answer.error), False
            continue
        data += answer.piece.data
        if len(data) == answer.piece.total_bytes:
            whole = results_pb2.OperationResult.FromString(bytes(data))
            data.clear()
            yield answer.request_id, whole, True


def anything(result: results_pb2.OperationResult) -> Any:
    """The result of a request whatever its kind."""
    return getattr(result, result.WhichOneof("kind") or "error")
