"""The way in: one connection to a cluster."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

import grpc

from tinsmith.v1 import models_pb2, server_pb2, sessions_pb2
from tinsmith_client.calls import Calls
from tinsmith_client.errors import CallFailed
from tinsmith_client.results import Pending, anything
from tinsmith_client.sessions import Session

_FILES_S = 120.0


class Client:
    """A connection to a cluster's gateways. Safe to use from several threads.

    Args:
        target: "host:port" of the gRPC port.
        api_key: a key of the cluster.
        patience: seconds for which a call is repeated while the service is away or full.
        credentials: of TLS (`grpc.ssl_channel_credentials()`); None: plaintext.
    """

    def __init__(
        self,
        target: str,
        api_key: str,
        *,
        patience: float = 600.0,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._calls = Calls(target, api_key, patience, credentials)

    def server_info(self) -> server_pb2.GetServerInfoResponse:
        """Version, limits, losses and base models of the cluster."""
        found: server_pb2.GetServerInfoResponse = self._calls.unary(
            "GetServerInfo", server_pb2.GetServerInfoRequest()
        )
        return found

    def create_session(
        self, tags: Iterable[str] = (), user_metadata: Mapping[str, str] | None = None
    ) -> Session:
        """A new session."""
        request = sessions_pb2.CreateSessionRequest(
            tags=tags, user_metadata=user_metadata, idempotency_key=uuid.uuid4().hex
        )
        return Session(self._calls, self._calls.unary("CreateSession", request).session_id)

    def open_session(self, session_id: str) -> Session:
        """A session that is there already, for example of an earlier process that was killed.

        Raises:
            Refused: there is none, or it is over.
        """
        self._calls.unary("Heartbeat", sessions_pb2.HeartbeatRequest(session_id=session_id))
        found = self._calls.unary("GetSession", sessions_pb2.GetSessionRequest(session_id=session_id)).session
        return Session(self._calls, session_id, _after(found.model_ids), _after(found.sampling_session_ids))

    def pending(self, request_id: str) -> Pending[Any]:
        """The result of a request that was accepted earlier, perhaps by another process. It stays a day."""
        return Pending(self._calls, request_id, anything)

    def tokenizer(self, base_model: str) -> Mapping[str, bytes]:
        """The files of a base model's tokenizer, by name; the tokenizers library reads tokenizer.json."""
        request = models_pb2.GetTokenizerRequest(base_model=base_model)
        for attempt in self._calls.attempts():
            files: defaultdict[str, bytearray] = defaultdict(bytearray)
            try:
                for piece in self._calls.stream("GetTokenizer", request, _FILES_S):
                    files[piece.file] += piece.data
                return {name: bytes(data) for name, data in files.items()}
            except CallFailed as error:
                attempt.failed(error)
        raise AssertionError("attempts end with an error")

    def close(self) -> None:
        """Closes the connection. Sessions stay as they are."""
        self._calls.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _after(object_ids: Iterable[str]) -> int:
    """The number after those of a session's models or sampling sessions."""
    return max((int(one.rpartition(":")[2]) + 1 for one in object_ids), default=0)
