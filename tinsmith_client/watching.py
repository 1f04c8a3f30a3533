"""All samples of a sampler, read from one stream.

Invariant: a stream that ends or breaks off is followed by another one, which goes on after the last sample
that was told. What was told counts no more for what the API key may keep.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from tinsmith.v1 import results_pb2
from tinsmith_client.calls import Attempt, Calls
from tinsmith_client.errors import CallFailed
from tinsmith_client.results import let_go

_STREAM_S = 50.0
_LEAST_S = 1.0
"""Longest and shortest life of a stream. Proxies cut one that is silent for a minute."""
_LET_GO_AT_ONCE = 64


def watched(
    calls: Calls, sampling_session_id: str, clone: int, timeout: float | None
) -> Iterator[tuple[str, results_pb2.OperationResult]]:
    """Samples in the order in which they are resolved; see `Sampler.watch`."""
    request = results_pb2.WatchSamplesRequest(sampling_session_id=sampling_session_id, clone=clone)
    had: list[str] = []
    since = time.monotonic()
    for attempt in calls.attempts():
        left = _STREAM_S if timeout is None else since + timeout - time.monotonic()
        try:
            for request_id, result in _read(calls, request, max(_LEAST_S, min(left, _STREAM_S)), attempt):
                had.append(request_id)
                yield request_id, result
                since = time.monotonic()
                if len(had) >= _LET_GO_AT_ONCE:
                    let_go(calls, had)
                    had.clear()
        except CallFailed as error:
            if error.reason == "CURSOR_EXPIRED":
                # For a day there was nothing. What is kept is what was not told yet.
                request.cursor = 0
            else:
                attempt.failed(error)
        finally:
            let_go(calls, had)
            had.clear()
        if timeout is not None and time.monotonic() >= since + timeout:
            raise TimeoutError(f"no sample of {sampling_session_id} ended for {timeout:g} s")


def _read(
    calls: Calls, request: results_pb2.WatchSamplesRequest, seconds: float, attempt: Attempt
) -> Iterator[tuple[str, results_pb2.OperationResult]]:
    """What one stream tells. The request is moved on behind it."""
    data = bytearray()
    for answer in calls.stream("WatchSamples", request, seconds):
        attempt.went_well()
        data += answer.piece.data
        if not answer.cursor:
            continue
        if answer.HasField("error"):
            whole = results_pb2.OperationResult(error=answer.error)
        else:
            whole = results_pb2.OperationResult.FromString(bytes(data))
        data.clear()
        request.cursor = answer.cursor
        yield answer.request_id, whole
