"""The sampler replicas as one gateway uses them: who runs a sample, and what became of it.

Invariant: `in_flight` counts the sequences that this gateway has a replica generate, no more and no less;
a replica that is not ready (draining) gets nothing new.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import grpc.aio

from services.common.contract.errors import DeadlineExceeded, Internal
from services.common.state.registry import ServiceRecord
from services.gateway.cluster.discovery import Services, call_error
from services.gateway.sampling import choose_replica
from tinsmith.internal.v1 import sampler_pb2, sampler_pb2_grpc
from tinsmith.v1 import results_pb2

SAMPLE_TIMEOUT_S = 1800.0


class Replicas:
    """Samplers of all base models.

    Args:
        timeout: deadline of one Sample call in seconds.
    """

    def __init__(self, samplers: Services, timeout: float = SAMPLE_TIMEOUT_S) -> None:
        self._samplers = samplers
        samplers.listen(self._wake)
        self._timeout = timeout
        self._change = asyncio.Event()
        self._in_flight: Counter[str] = Counter()

    def listen(self, on_change: Callable[[], None]) -> None:
        """Has a function called whenever a replica came, went or changed."""
        self._samplers.listen(on_change)

    def ready(self, base_model: str) -> dict[str, ServiceRecord]:
        """Replicas that take new samples, by incarnation."""
        serving = self._samplers.serving(base_model)
        return {record.incarnation: record for record in serving if record.state == "ready"}

    def retired(self, base_model: str) -> bool:
        """Whether no replica samples a base model, and none will."""
        return self._samplers.retired(base_model)

    def choose(
        self, base_model: str, wanted: choose_replica.Affinity, avoided: set[str]
    ) -> ServiceRecord | None:
        """The replica for a sample with this affinity; None when there is none but avoided ones."""
        ready = self.ready(base_model)
        replicas = [
            choose_replica.Replica(name, self._in_flight[name], record.weights)
            for name, record in ready.items()
            if name not in avoided
        ]
        chosen = choose_replica.choose(replicas, wanted)
        return None if chosen is None else ready[chosen.id]

    async def call(
        self, replica: ServiceRecord, request: sampler_pb2.SampleRequest
    ) -> results_pb2.OperationResult:
        """Has a replica run a sample. Cancelling the caller stops it there.

        Raises:
            Unavailable: the replica is gone, or draining.
            Overloaded: its queue is full.
            TinsmithError: the sample failed.
        """
        name, weight = replica.incarnation, request.num_samples
        self._in_flight[name] += weight
        try:
            stub = sampler_pb2_grpc.SamplerServiceStub(self._samplers.channel(replica))
            reply = await stub.Sample(request, timeout=self._timeout)
        except grpc.aio.AioRpcError as raw:
            error = call_error(raw)
            if isinstance(error, DeadlineExceeded):
                raise DeadlineExceeded(
                    f"the sample took longer than {self._timeout:.0f} s; lower max_tokens"
                ) from raw
            raise error from raw
        finally:
            self._in_flight[name] -= weight
            if not self._in_flight[name]:
                del self._in_flight[name]
        kind = reply.WhichOneof("kind")
        if kind == "result":
            return results_pb2.OperationResult(sample=reply.result)
        if kind == "error":
            return results_pb2.OperationResult(error=reply.error)
        raise Internal(f"sampler {replica.id} answered with nothing")

    @property
    def change(self) -> asyncio.Event:
        """Set when a replica next comes, goes or changes. Take it before looking."""
        return self._change

    def _wake(self) -> None:
        self._change.set()
        self._change = asyncio.Event()
