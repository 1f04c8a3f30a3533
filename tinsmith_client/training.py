"""Models in training.

Invariant: operations are numbered without gaps in the order in which they are called. A number that may
or may not have been used is looked up before the next one is given.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tinsmith.v1 import checkpoints_pb2, models_pb2, training_pb2
from tinsmith_client.errors import CallFailed, Unreachable
from tinsmith_client.results import Pending
from tinsmith_client.sampling import Sampler

if TYPE_CHECKING:
    from tinsmith_client.sessions import Session


class Model:
    """A model of a session. Safe to use from several threads.

    Attributes:
        model_id: names it.
        last_seq_id: number of the last operation that was accepted; None: to be looked up.
    """

    def __init__(self, session: Session, model_id: str, last_seq_id: int | None) -> None:
        self._session = session
        self._calls = session.calls
        self._sending = threading.Lock()
        self.model_id = model_id
        self.last_seq_id = last_seq_id

    def info(self) -> models_pb2.ModelInfo:
        """What the model is."""
        return self._info().model

    def forward_backward(
        self,
        data: Sequence[training_pb2.Datum],
        loss_fn: str = "cross_entropy",
        loss_config: Mapping[str, float] | None = None,
        forward_only: bool = False,
    ) -> Pending[training_pb2.ForwardBackwardResult]:
        """Adds a batch's gradient to the model's; see docs/losses.md for what a loss takes."""
        work = training_pb2.ForwardBackward(
            data=data, loss_fn=loss_fn, loss_config=loss_config, forward_only=forward_only
        )
        request = training_pb2.ForwardBackwardRequest(forward_backward=work)
        return Pending(
            self._calls, self._send("ForwardBackward", request).request_id, lambda r: r.forward_backward
        )

    def optim_step(
        self,
        learning_rate: float,
        beta1: float = 0.9,
        beta2: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        grad_clip_norm: float = 0.0,
    ) -> Pending[training_pb2.OptimStepResult]:
        """One AdamW step on the gradient so far."""
        adam = training_pb2.AdamParams(
            learning_rate=learning_rate,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            weight_decay=weight_decay,
            grad_clip_norm=grad_clip_norm,
        )
        sent = self._send("OptimStep", training_pb2.OptimStepRequest(adam=adam))
        return Pending(self._calls, sent.request_id, lambda r: r.optim_step)

    def save_state(
        self, name: str = "", ttl_seconds: int = 0, overwrite: bool = False
    ) -> Pending[checkpoints_pb2.SaveStateResult]:
        """Saves weights and optimizer state."""
        request = checkpoints_pb2.SaveStateRequest(name=name, ttl_seconds=ttl_seconds, overwrite=overwrite)
        return Pending(self._calls, self._send("SaveState", request).request_id, lambda r: r.save_state)

    def load_state(self, path: str, optimizer: bool = True) -> Pending[checkpoints_pb2.LoadStateResult]:
        """Replaces the weights, and the optimizer's state, by saved ones."""
        request = checkpoints_pb2.LoadStateRequest(path=path, optimizer=optimizer)
        return Pending(self._calls, self._send("LoadState", request).request_id, lambda r: r.load_state)

    def save_for_sampler(
        self, name: str, ttl_seconds: int = 0
    ) -> Pending[checkpoints_pb2.SaveForSamplerResult]:
        """Saves the weights as a named checkpoint to sample from; see `Session.sampler`."""
        request = checkpoints_pb2.SaveForSamplerRequest(name=name, ttl_seconds=ttl_seconds)
        return Pending(
            self._calls, self._send("SaveForSampler", request).request_id, lambda r: r.save_for_sampler
        )

    def sampler(self, *, inflight: bool = False) -> Sampler:
        """What answers from the weights as they are after the operations so far. Waits until it is there.

        Args:
            inflight: it moves with the model: each later call with this moves all such samplers.
        """
        number = self._session.next_sampler()
        request = checkpoints_pb2.SaveForSamplerRequest(sampling_session_seq_id=number, inflight=inflight)
        sent = self._send("SaveForSampler", request)
        Pending(self._calls, sent.request_id, lambda r: r.save_for_sampler).result()
        return Sampler(self._calls, sent.sampling_session_id)

    def _info(self) -> models_pb2.GetModelInfoResponse:
        asked = models_pb2.GetModelInfoRequest(model_id=self.model_id)
        found: models_pb2.GetModelInfoResponse = self._calls.unary("GetModelInfo", asked)
        return found

    def _send(self, method: str, request: Any) -> Any:
        """Sends an operation with the next number."""
        with self._sending:
            last = self._info().last_seq_id if self.last_seq_id is None else self.last_seq_id
            request.model_id, request.seq_id = self.model_id, last + 1
            try:
                accepted = self._calls.unary(method, request)
            except CallFailed as error:
                # It may have been accepted, or another process has used the number.
                if isinstance(error, Unreachable) or error.status == "ALREADY_EXISTS":
                    self.last_seq_id = None
                raise
            self.last_seq_id = last + 1
            return accepted
