"""Hostile calls over gRPC: every method of the public contract."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor

from tests.abuse import values
from tests.abuse.attack import Attempt, End, Outcome
from tests.abuse.target import Target
from tinsmith.v1 import service_pb2

MIB = 1024 * 1024
SERVICE = service_pb2.DESCRIPTOR.services_by_name["TinsmithService"]
_FAULTS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS}
_DEADLINE_S = 75.0
"""GetResult waits for up to 60 s."""


class Rpc:
    """Makes attempts on the gRPC port."""

    def __init__(self, target: Target, channel: grpc.aio.Channel, seed: int) -> None:
        self._target = target
        self._channel = channel
        self._seed = seed

    def attempts(self, each: int) -> Iterator[Attempt]:
        """`each` attempts of every kind that is made of random values, and the rest."""
        for method in SERVICE.methods:
            drawn = values.drawn(values.messages(method.input_type, self._target.known), each, self._seed)
            for message in drawn:
                yield self._attempt(f"{method.name}: fields", method, message.SerializeToString())
            yield from self._bytes(method, [message.SerializeToString() for message in drawn[:5]])
            yield from self._strangers(method)
            yield from self._shapes(method)
        yield self._named("no such method", "/tinsmith.v1.TinsmithService/DropAllTables", b"")
        yield self._named("no such service", "/tinsmith.v1.AdminService/Drop", b"")
        yield self._named("a path of 8,000 characters", "/" + "a" * 8_000, b"")

    def _bytes(self, method: MethodDescriptor, whole: list[bytes]) -> Iterator[Attempt]:
        for place, raw in enumerate(whole):
            damaged = values.drawn(values.damaged(raw), 1, self._seed + place)[0]
            yield self._attempt("bytes", method, damaged)
        yield self._attempt("fields of another contract", method, values.field(99, b"a") * 100)
        yield self._attempt("groups", method, b"\x9b\x06" * 5_000)
        yield self._attempt(
            "a message of 5 MB that says nothing", method, values.field(98, b"\0" * (5 * MIB))
        )
        yield self._attempt("millions of empty fields", method, b"\x9a\x06\x00" * 1_000_000)

    def _strangers(self, method: MethodDescriptor) -> Iterator[Attempt]:
        empty: tuple[tuple[str, str | bytes], ...] = ()
        others: dict[str, tuple[tuple[str, str | bytes], ...]] = {
            "no key": empty,
            "wrong keys": (("x-api-key", "tml-wrong"),),
            "long keys": (("x-api-key", "x" * 6_000),),
            "keys in bytes": (("x-api-key-bin", b"\xff\xfe"),),
            "two keys": (("x-api-key", "a"), ("x-api-key", self._target.key)),
        }
        for kind, metadata in others.items():
            yield self._attempt(kind, method, b"", metadata)
        if method.name in ("ForwardBackward", "Sample"):
            for _ in range(3):
                yield self._attempt("60 MB without a key", method, b"\0" * (60 * MIB), empty)

    def _shapes(self, method: MethodDescriptor) -> Iterator[Attempt]:
        message = method.input_type._concrete_class()
        if method.name == "Sample":
            tensor = message.prompt
            message.sampling_session_id = self._target.sampling_session_id
            message.num_samples = 1
        elif method.name == "ForwardBackward":
            message.model_id, message.seq_id = self._target.model_id, 900_003
            tensor = message.forward_backward.data.add().tokens
        else:
            return
        for shape in ([2**62] * 60_000, [-1], [2**31, 2**31], [1, 1, 1], [2**62]):
            del tensor.shape[:]
            tensor.shape.extend(shape)
            yield self._attempt("shapes", method, message.SerializeToString())

    def _attempt(
        self,
        kind: str,
        method: MethodDescriptor,
        raw: bytes,
        metadata: tuple[tuple[str, str | bytes], ...] | None = None,
    ) -> Attempt:
        path = f"/{SERVICE.full_name}/{method.name}"
        return self._named(kind, path, raw, metadata, method.server_streaming)

    def _named(
        self,
        kind: str,
        path: str,
        raw: bytes,
        metadata: tuple[tuple[str, str | bytes], ...] | None = None,
        streams: bool = False,
    ) -> Attempt:
        sent = (("x-api-key", self._target.key),) if metadata is None else metadata
        return Attempt(f"gRPC {kind}", partial(self._call, path, raw, sent, streams), _DEADLINE_S + 60)

    async def _call(
        self, path: str, raw: bytes, metadata: tuple[tuple[str, str | bytes], ...], streams: bool
    ) -> Outcome:
        try:
            if streams:
                async for _ in self._channel.unary_stream(path)(raw, metadata=metadata, timeout=_DEADLINE_S):
                    pass
            else:
                await self._channel.unary_unary(path)(raw, metadata=metadata, timeout=_DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            said = f"{error.code()} {error.details()}"
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return Outcome(End.HANG, said)
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                return Outcome(End.CLOSED, said)
            return Outcome(End.FAULT if error.code() in _FAULTS else End.REFUSED, said)
        return Outcome(End.ANSWERED)
