"""A member of the weight wire that keeps what it receives: the receiving half of a sampler."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, NoReturn

import grpc
import numpy as np
import redis

from services.common import weights
from services.common.contract import tensors
from services.common.contract.tensors import TensorSpec
from services.common.process import rpc
from services.common.state.registry import ServiceRecord
from tests.announced import announce, withdraw
from tests.component.trainer.world import BASE_MODEL
from tinsmith.internal.v1 import sampler_pb2, sampler_pb2_grpc


class Receiver(sampler_pb2_grpc.SamplerServiceServicer):
    """Announced in Redis and serving JoinGroup and ReceiveSnapshot while the context is entered.

    Attributes:
        epoch: weight group it is in.
        snapshots: (model id, version) -> tensors received.
    """

    def __init__(self, redis_url: str, name: str) -> None:
        self._redis_url = redis_url
        self._redis = redis.Redis.from_url(redis_url)
        self._name = name
        self._group: weights.WeightGroup | None = None
        self.epoch = 0
        self.snapshots: dict[tuple[str, int], dict[str, np.ndarray]] = {}
        self._server = grpc.server(ThreadPoolExecutor(4))
        sampler_pb2_grpc.add_SamplerServiceServicer_to_server(self, self._server)
        self._port = self._server.add_insecure_port("127.0.0.1:0")

    def __enter__(self) -> Receiver:
        self._server.start()
        record = ServiceRecord(
            kind="sampler", id=self._name, address=f"127.0.0.1:{self._port}", base_model=BASE_MODEL
        )
        announce(self._redis, record, 120)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        withdraw(self._redis, "sampler", self._name)
        self.vanish()

    def vanish(self) -> None:
        """Stops answering, but stays announced."""
        self._server.stop(0).wait()
        if self._group is not None:
            self._group.abort()

    def JoinGroup(self, request: sampler_pb2.JoinGroupRequest, context: Any) -> sampler_pb2.JoinGroupResponse:
        try:
            self._group = weights.join(
                BASE_MODEL,
                request.epoch,
                request.first_rank,
                request.world_size,
                "cpu",
                self._redis_url,
                request.timeout_seconds,
            )
        except RuntimeError as error:
            self._tell(context, error)
        self.epoch = request.epoch
        return sampler_pb2.JoinGroupResponse()

    def ReceiveSnapshot(
        self, request: sampler_pb2.ReceiveSnapshotRequest, context: Any
    ) -> sampler_pb2.ReceiveSnapshotResponse:
        assert self._group is not None and request.epoch == self.epoch
        specs = [
            TensorSpec(spec.name, tensors.dtype_from_pb(spec.dtype), tuple(spec.shape))
            for spec in request.tensors
        ]
        try:
            buffer, checksum = self._group.receive(weights.nbytes(specs), request.timeout_seconds)
        except RuntimeError as error:
            self._tell(context, error)
        assert checksum == request.checksum
        self.snapshots[request.snapshot.model_id, request.snapshot.version] = {
            name: tensor.numpy().copy() for name, tensor in weights.unpack(buffer, specs).items()
        }
        return sampler_pb2.ReceiveSnapshotResponse()

    @staticmethod
    def _tell(context: Any, error: RuntimeError) -> NoReturn:
        """As a sampler does whose workers waited in vain."""
        context.set_trailing_metadata(((rpc.CODE_METADATA, "deadline_exceeded"),))
        context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, str(error))
        raise error
