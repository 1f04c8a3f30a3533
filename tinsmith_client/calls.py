"""Calls of the service, with key, deadline and repetition.

Invariant: a call is repeated only while it may succeed, and no longer than its caller is patient.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import grpc

from tinsmith.v1 import service_pb2_grpc
from tinsmith_client.errors import CallFailed, Refused, Unreachable

CALL_S = 60.0
_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 10.0
_OPTIONS = [
    ("grpc.max_receive_message_length", 256 * 1024 * 1024),
    # A peer that vanished without closing the connection is noticed.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
]


class Calls:
    """The methods of one service.

    Args:
        target: "host:port".
        api_key: a key of the cluster.
        patience: seconds for which a call is repeated.
        credentials: of TLS; None: plaintext.
    """

    def __init__(
        self, target: str, api_key: str, patience: float, credentials: grpc.ChannelCredentials | None
    ) -> None:
        if credentials is None:
            self._channel = grpc.insecure_channel(target, options=_OPTIONS)
        else:
            self._channel = grpc.secure_channel(target, credentials, options=_OPTIONS)
        self._stub = service_pb2_grpc.TinsmithServiceStub(self._channel)
        self._metadata = (("x-api-key", api_key),)
        self.patience = patience

    def unary(self, method: str, request: Any, seconds: float = CALL_S) -> Any:
        """The answer of a call.

        Raises:
            Refused: the request has to change.
            Unreachable: it failed for as long as this client is patient.
        """
        for attempt in self.attempts():
            try:
                return getattr(self._stub, method)(request, timeout=seconds, metadata=self._metadata)
            except grpc.RpcError as error:
                attempt.failed(error)
        raise AssertionError("attempts end with an error")

    def once(self, method: str, request: Any, seconds: float) -> Any:
        """The answer of a call, which is not repeated. Raises CallFailed."""
        try:
            return getattr(self._stub, method)(request, timeout=seconds, metadata=self._metadata)
        except grpc.RpcError as error:
            raise CallFailed(error) from error

    def stream(self, method: str, request: Any, seconds: float | None) -> Iterator[Any]:
        """The answers of a call, which is not repeated.

        Raises:
            CallFailed: while iterating.
        """
        call = getattr(self._stub, method)(request, timeout=seconds, metadata=self._metadata)
        try:
            yield from call
        except grpc.RpcError as error:
            raise CallFailed(error) from error
        finally:
            call.cancel()

    def attempts(self) -> Iterator[Attempt]:
        """Attempts at something, with pauses after those that fail."""
        attempt = Attempt(self.patience)
        pause = _FIRST_PAUSE_S
        while True:
            attempt.error = None
            yield attempt
            if attempt.error is None:
                attempt.went_well()
            if attempt.failing_since is None:
                pause = _FIRST_PAUSE_S
            if attempt.error is not None:
                time.sleep(max(pause * random.uniform(0.5, 1), attempt.error.retry_after or 0))
                pause = min(2 * pause, _LONGEST_PAUSE_S)

    def close(self) -> None:
        self._channel.close()


class Attempt:
    """Attempts at one thing, and since when they fail."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self.failing_since: float | None = None
        self.error: CallFailed | None = None

    def went_well(self) -> None:
        """Something came of it: from now on all patience is there again."""
        self.failing_since = None

    def failed(self, error: grpc.RpcError | CallFailed) -> None:
        """Notes a failure after which another attempt makes sense.

        Raises:
            Refused, Unreachable: none does.
        """
        now = time.monotonic()
        if self.failing_since is None:
            self.failing_since = now
        self.error = error if isinstance(error, CallFailed) else CallFailed(error)
        cause = self.error.__cause__ if isinstance(error, CallFailed) else error
        if not self.error.passes:
            raise Refused(cause) from cause
        if now - self.failing_since >= self._patience:
            raise Unreachable(cause) from cause
