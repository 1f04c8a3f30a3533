"""Sessions: what a program makes belongs to one.

Invariant: while a session is open here it is kept alive, whatever the program does meanwhile.
"""

from __future__ import annotations

import logging
import threading
from types import TracebackType

from tinsmith.v1 import models_pb2, sampling_pb2, sessions_pb2
from tinsmith_client.calls import Calls
from tinsmith_client.errors import TinsmithError
from tinsmith_client.results import Pending
from tinsmith_client.sampling import Sampler
from tinsmith_client.training import Model

log = logging.getLogger(__name__)

_HEARTBEAT_S = 10.0


class Session:
    """An open session. As a context it is finished in the end: its models are let go, checkpoints stay.

    Attributes:
        session_id: names it; `Client.open_session` goes on with it.
    """

    def __init__(self, calls: Calls, session_id: str, models: int = 0, samplers: int = 0) -> None:
        self.calls = calls
        self.session_id = session_id
        self._counting = threading.Lock()
        self._models, self._samplers = models, samplers
        self._over = threading.Event()
        self._beats = threading.Thread(target=self._beat, name=f"heartbeats {session_id}", daemon=True)
        self._beats.start()

    def create_model(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        *,
        train_attn: bool = True,
        train_mlp: bool = True,
        train_unembed: bool = True,
    ) -> Model:
        """A fresh adapter on a base model. Returns when it is there.

        Raises:
            Refused, RequestFailed: there cannot be such a model.
        """
        lora = models_pb2.LoraConfig(
            rank=rank, seed=seed, train_attn=train_attn, train_mlp=train_mlp, train_unembed=train_unembed
        )
        request = models_pb2.CreateModelRequest(
            session_id=self.session_id, model_seq_id=self._next_model(), base_model=base_model, lora=lora
        )
        return self._made(self.calls.unary("CreateModel", request))

    def create_model_from(self, path: str, optimizer: bool = True) -> Model:
        """A model that goes on from a training checkpoint. Returns when it is there. Raises as
        `create_model`."""
        request = models_pb2.CreateModelFromStateRequest(
            session_id=self.session_id, model_seq_id=self._next_model(), path=path, optimizer=optimizer
        )
        return self._made(self.calls.unary("CreateModelFromState", request))

    def model(self, model_id: str) -> Model:
        """A model that this session has already, for example made by an earlier process. Its next operation
        has the number after the last one that was used."""
        found = self.calls.unary("GetModelInfo", models_pb2.GetModelInfoRequest(model_id=model_id))
        return Model(self, model_id, found.last_seq_id)

    def sampler(self, *, base_model: str = "", path: str = "") -> Sampler:
        """What answers from a base model's own weights, or from a checkpoint to sample from."""
        request = sampling_pb2.CreateSamplingSessionRequest(
            session_id=self.session_id, sampling_session_seq_id=self.next_sampler()
        )
        if path:
            request.model_path = path
        else:
            request.base_model = base_model
        return Sampler(self.calls, self.calls.unary("CreateSamplingSession", request).sampling_session_id)

    def next_sampler(self) -> int:
        """The next sampling session's number."""
        with self._counting:
            self._samplers += 1
            return self._samplers - 1

    def finish(self) -> None:
        """Ends the session for good."""
        self.leave()
        self.calls.unary("FinishSession", sessions_pb2.FinishSessionRequest(session_id=self.session_id))

    def leave(self) -> None:
        """Sends no more signs of life. Another process may go on with the session."""
        self._over.set()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()

    def _next_model(self) -> int:
        with self._counting:
            self._models += 1
            return self._models - 1

    def _made(
        self, accepted: models_pb2.CreateModelResponse | models_pb2.CreateModelFromStateResponse
    ) -> Model:
        Pending(self.calls, accepted.request_id, lambda r: r.create_model).result()
        return Model(self, accepted.model_id, 0)

    def _beat(self) -> None:
        while not self._over.wait(_HEARTBEAT_S):
            try:
                self.calls.unary("Heartbeat", sessions_pb2.HeartbeatRequest(session_id=self.session_id))
            except (TinsmithError, ValueError) as error:
                # ValueError: the channel is closed.
                if not self._over.is_set():
                    log.warning("session %s: no sign of life: %s", self.session_id, error)
