"""Hostile bodies of forward_backward: protobuf, compressed or not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import zstandard

from tests.abuse import values
from tests.abuse.target import Target
from tinsmith.internal.v1 import tinker_pb2

MIB = 1024 * 1024
PROTOBUF = "application/x-protobuf"


@dataclass(frozen=True)
class Batch:
    """One body as it is sent."""

    kind: str
    body: bytes
    headers: dict[str, str] = field(default_factory=lambda: {"content-type": PROTOBUF})


def batches(target: Target, each: int, seed: int) -> Iterator[Batch]:
    """`each` of every kind that is made of random values, and the rest."""
    yield from _random(target, each, seed)
    yield from _shapes(target)
    yield from _large(target)
    yield from _malformed(target)
    yield from _compressed(target)


def valid(target: Target, seq_id: int = 900_002) -> tinker_pb2.TinkerForwardBackwardRequest:
    """A batch of one example of three tokens."""
    message = tinker_pb2.TinkerForwardBackwardRequest(
        model_id=target.model_id, seq_id=seq_id, loss_fn="cross_entropy"
    )
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = b"\1\0\0\0" * 3
    targets, weights = datum.loss_fn_inputs["target_tokens"], datum.loss_fn_inputs["weights"]
    targets.dtype, targets.dense = tinker_pb2.TINKER_DATA_TYPE_INT64, b"\1\0\0\0\0\0\0\0" * 3
    weights.dtype, weights.dense = tinker_pb2.TINKER_DATA_TYPE_FLOAT32, b"\0\0\x80\x3f" * 3
    targets.shape.append(3)
    weights.shape.append(3)
    return message


def _compressed_body(kind: str, body: bytes, encoding: str = "zstd") -> Batch:
    return Batch(kind, body, {"content-type": PROTOBUF, "content-encoding": encoding})


def _random(target: Target, each: int, seed: int) -> Iterator[Batch]:
    kind = tinker_pb2.TinkerForwardBackwardRequest.DESCRIPTOR
    for message in values.drawn(values.messages(kind, target.known), each, seed):
        yield Batch("fields", message.SerializeToString())
    whole = valid(target).SerializeToString()
    for body in values.drawn(values.damaged(whole), each, seed):
        yield Batch("bytes", body)
    for body in values.drawn(values.damaged(zstandard.compress(whole)), each, seed):
        yield _compressed_body("zstd bytes", body)


def _shapes(target: Target) -> Iterator[Batch]:
    shapes = {
        "60,000 dimensions": [2**62] * 60_000,
        "a negative dimension": [-1],
        "dimensions that overflow": [2**62, 2**62],
        "a shape of nothing": [],
        "a million columns": [1, 1_000_000],
    }
    for kind, shape in shapes.items():
        message = valid(target)
        tensor = message.data[0].loss_fn_inputs["target_tokens"]
        del tensor.shape[:]
        tensor.shape.extend(shape)
        for _ in range(3):
            yield Batch(f"shapes: {kind}", message.SerializeToString())
    message = valid(target)
    sparse = message.data[0].loss_fn_inputs["target_tokens"]
    sparse.sparse_csr.crow_indices = b"\0" * 16
    del sparse.shape[:]
    sparse.shape.extend([1, 25_000_000])
    for _ in range(10):
        yield Batch("a sparse tensor of 200 MB", message.SerializeToString())


def _large(target: Target) -> Iterator[Batch]:
    message = valid(target)
    message.loss_fn = "x" * MIB
    yield Batch("a loss with a name of 1 MB", message.SerializeToString())
    message = valid(target)
    for number in range(50_000):
        message.loss_fn_config[f"k{number}"] = 1.0
    yield Batch("50,000 settings", message.SerializeToString())
    head = valid(target).SerializeToString()
    yield Batch("4 million empty examples", head + b"\x1a\x00" * 4_000_000)
    yield Batch("65 MB", b"\0" * (65 * MIB))


def _malformed(target: Target) -> Iterator[Batch]:
    head = valid(target).SerializeToString()
    yield Batch("a field of another contract", head + values.field(99, b"a"))
    yield Batch("groups", head + b"\x9b\x06" * 5_000)
    yield Batch("a length beyond the end", head + b"\x1a\xff\xff\xff\xff\x07")
    for content_type in ("application/json", "text/plain", "", f"{PROTOBUF}; a=b", "a" * 5_000):
        yield Batch("another content type", head, {"content-type": content_type})


def _compressed(target: Target) -> Iterator[Batch]:
    head = valid(target).SerializeToString()
    packed = zstandard.ZstdCompressor(level=3)
    stream = packed.compressobj()
    unknown = stream.compress(head) + stream.flush()
    far = zstandard.ZstdCompressionParameters(window_log=27, enable_ldm=True)
    odd = {
        "millions of empty examples": packed.compress(head + b"\x1a\x00" * 40_000_000),
        "190 MB of zeros": packed.compress(b"\0" * (190 * MIB)),
        "300 MB of zeros": packed.compress(b"\0" * (300 * MIB)),
        "no size": unknown,
        "cut off": packed.compress(head * 100)[:-9],
        "two frames": packed.compress(head) * 2,
        "a frame in a frame": packed.compress(packed.compress(head)),
        "a window of 128 MiB": zstandard.ZstdCompressor(compression_params=far).compress(head * 100),
        "a dictionary": b"\x28\xb5\x2f\xfd\x23\x01\x02\x03\x04" + head,
        "no frame": head,
    }
    for kind, body in odd.items():
        for _ in range(2):
            yield _compressed_body(f"zstd: {kind}", body)
    for encoding in ("gzip", "br", "zstd, zstd", "deflate", "x" * 5_000, "identity, zstd"):
        yield _compressed_body("another encoding", head, encoding)
