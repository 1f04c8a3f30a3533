"""Publishes snapshots: to the store, and over the wire to every live sampler of the base model.

A snapshot is an adapter, or all weights of a model that was fine-tuned in full.

Invariants: a snapshot, once stored, never changes, and what goes over the wire is what is stored. The
wire is an optimisation: a sampler that misses a broadcast loads the snapshot from the store, so no failure
of a sampler fails a publish.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import Counter, Histogram
from torch import Tensor

from services.common.contract.tensors import HostTensor
from services.common.storage.data_dir import DataDir
from services.common.storage.directory import directory_bytes, publish_directory
from services.common.telemetry import tracing
from services.common.telemetry.metrics import LONG_S
from services.trainer.compute.data import LoraSpec
from services.trainer.files.base import Base
from services.trainer.files.copy_room import let_in
from services.trainer.files.export_format import read_adapter, weight_files
from services.trainer.files.volume import Volume
from services.trainer.publish.broadcast import Broadcaster
from services.trainer.publish.cargo import Cargo

SECONDS = Histogram("tinsmith_publish_seconds", "Snapshots stored and sent to every sampler", buckets=LONG_S)
BYTES = Counter("tinsmith_published_bytes_total", "Bytes of snapshots, stored and sent", ["way"])

Pack = Callable[[LoraSpec | None, Mapping[str, Tensor]], Cargo | None]
"""Of an adapter, or without one all weights of a model."""

PACKED_BYTES = 2**28
"""Of snapshots that are packed and were not sent yet, but for one that is larger. They are counted in
float32, so that adapters in bfloat16 take half as much of the device, where nothing is kept free for them."""


@dataclass(frozen=True)
class Published:
    """What became of a publish.

    Attributes:
        size_bytes: of the stored files.
        receivers: sampler workers that have it from the wire.
    """

    size_bytes: int
    wire_bytes: int
    receivers: int


class Publisher:
    """Stores and broadcasts snapshots of one base model."""

    def __init__(self, data: DataDir, base: Base, broadcaster: Broadcaster) -> None:
        self._data = data
        self._volume = Volume(data)
        self._base = base
        self._broadcaster = broadcaster
        self._packed = 0
        """Bytes of what is packed and was not sent yet."""

    async def answers(self) -> None:
        """Returns when the store is the one that it was at the start.

        Raises:
            StorageAway: it is not, or does not say.
        """
        await self._volume.answers()

    @contextmanager
    def packing(self, nbytes: int) -> Iterator[Pack]:
        """What makes, of a snapshot's tensors, what `publish` sends within the context: where they are, so
        that they go out of a device's memory where the medium can do that. So many at a time as have room for
        it, and one at least; what others send is packed on the host when it is their turn.

        Args:
            nbytes: of the snapshot, as its copy on the host is counted.
        """
        if not let_in([nbytes], self._packed, PACKED_BYTES):
            yield lambda lora, tensors: None
            return
        self._packed += nbytes
        try:
            yield self._broadcaster.pack
        finally:
            self._packed -= nbytes

    async def publish(
        self,
        model_id: str,
        version: int,
        lora: LoraSpec | None,
        tensors: Mapping[str, HostTensor],
        cargo: Cargo | None = None,
    ) -> Published:
        """Returns when the snapshot is stored and every live sampler has it or was given up.

        Args:
            lora: None = a full model.
            tensors: of an adapter `<module>.lora_A` and `<module>.lora_B`, float32; of a full model all
                weights by their Hugging Face names, float32 or bfloat16. They are not copied.
            cargo: the same, packed to be sent.

        Raises:
            OSError: it could not be stored.
            StorageAway: it may have been stored below a volume that is not there any more.
            Internal: the base model's configuration, which a full model needs, cannot be had.
        """
        with SECONDS.time(), tracing.span("publish the snapshot", version=version):
            published = await self._publish(model_id, version, lora, tensors, cargo)
        BYTES.labels("stored").inc(published.size_bytes)
        BYTES.labels("sent").inc(published.wire_bytes)
        return published

    async def _publish(
        self,
        model_id: str,
        version: int,
        lora: LoraSpec | None,
        tensors: Mapping[str, HostTensor],
        cargo: Cargo | None,
    ) -> Published:
        target = self._data.snapshot(model_id, version)
        if await asyncio.to_thread(target.is_dir):
            # Executed again after a restart: the first one stands, somebody may sample from it.
            size = await asyncio.to_thread(directory_bytes, target)
            if lora is None:
                # Not worth its memory: samplers read it from the store.
                return Published(size, wire_bytes=0, receivers=0)
            tensors = await asyncio.to_thread(read_adapter, target, self._base.head)
            return Published(size, *await self._broadcaster.send(model_id, version, lora, tensors))
        sent = asyncio.ensure_future(self._send(model_id, version, lora, tensors, cargo))
        try:
            size = await asyncio.to_thread(self._store, target, lora, tensors)
        except BaseException:
            await asyncio.gather(sent, return_exceptions=True)
            raise
        return Published(size, *await sent)

    async def _send(
        self,
        model_id: str,
        version: int,
        lora: LoraSpec | None,
        tensors: Mapping[str, HostTensor],
        cargo: Cargo | None,
    ) -> tuple[int, int]:
        """As `Broadcaster.send`. All weights of a model are on the device for as long as they are sent from
        there, and no longer."""
        if cargo is None or lora is not None:
            return await self._broadcaster.send(model_id, version, lora, cargo or tensors)
        if not await self._broadcaster.sends_from_device():
            cargo.leave_device(tensors)
        try:
            return await self._broadcaster.send(model_id, version, lora, cargo)
        finally:
            cargo.leave_device(tensors)

    def _store(self, target: Path, lora: LoraSpec | None, tensors: Mapping[str, HostTensor]) -> int:
        # Another trainer that had to run the same save may have stored it meanwhile: the first one stands.
        with suppress(FileExistsError):
            files = weight_files(self._base, lora, tensors)
            size = publish_directory(target, files, replace=False, leave_reserve=True)
            self._volume.check()
            return size
        return directory_bytes(target)
