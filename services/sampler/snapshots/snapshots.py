"""Keeps snapshots at hand: by broadcast when they are made, from the store on a miss, ahead of their turn as
far as there is memory.

Invariant: between the beginning and the end of `use` every worker has the snapshot, and what a snapshot
key names never changes: the first copy of a version that arrives stays.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge

from services.common.contract.errors import InvalidRequest, SnapshotNotFound, TinsmithError
from services.common.storage.data_dir import DataDir
from services.common.telemetry.repeats import Repeats
from services.common.weights.medium import Medium
from services.sampler.engine.snapshot_key import Adapter, SnapshotKey, Weights
from services.sampler.snapshots.adapter_slots import AdapterSlots
from services.sampler.snapshots.full_snapshots import FullSnapshots
from services.sampler.snapshots.held import Held
from services.sampler.snapshots.incoming import IncomingSnapshot
from services.sampler.snapshots.residency import Residency
from services.sampler.snapshots.versions import KnownVersions

if TYPE_CHECKING:
    from services.sampler.engine.engine import Engine

log = logging.getLogger(__name__)

RESIDENT = Gauge("tinsmith_adapters", "Adapters in memory that may be sampled from without a reload")
ARRIVED = Counter(
    "tinsmith_adapters_arrived_total",
    "Adapters that came into memory, by broadcast or from the store",
    ["way"],
)
EVICTED = Counter("tinsmith_adapters_evicted_total", "Adapters that made room for others")

LOAD_TIMEOUT_S = 120.0


class NotInGroup(TinsmithError):
    """The workers are not in the weight group of that epoch; the caller makes a new one."""

    default_code = "not_in_group"
    grpc_status = "FAILED_PRECONDITION"


class StillReceiving(TinsmithError):
    """The workers receive a snapshot of another weight group; the caller goes on without them this once."""

    default_code = "still_receiving"
    grpc_status = "UNAVAILABLE"


class Snapshots:
    """The snapshots of one engine."""

    def __init__(
        self,
        engine: Engine,
        data_dir: DataDir,
        residency: Residency,
        slots: AdapterSlots,
        full: FullSnapshots,
        adapts: bool = True,
        full_models: bool = True,
    ) -> None:
        self._adapts = adapts
        self._full_models = full_models
        self._engine = engine
        self._data_dir = data_dir
        self._residency = residency
        self._slots = slots
        self._full = full
        self._loads: dict[SnapshotKey, asyncio.Task[None]] = {}
        self._receiving = asyncio.Lock()
        self._cleanups: set[asyncio.Task[None]] = set()
        self._versions = KnownVersions()
        self._unloaded = Repeats(log, "a snapshot could not be loaded")
        self._not_arrived = Repeats(log, "a snapshot did not arrive")
        self._unclean = Repeats(log, "a clean-up failed")
        self.group_epoch = 0
        """Weight group the workers are in; 0 = none."""

    def resident(self) -> list[SnapshotKey]:
        """Snapshots in memory."""
        return self._residency.keys() + self._full.staged()

    @property
    def weights(self) -> Weights:
        """Whose weights are in the engine."""
        return self._full.weights

    @property
    def waiting(self) -> int:
        """Requests that wait for the turn of their adapter or their weights."""
        return self._slots.waiting + self._full.waiting

    def newer(self, key: SnapshotKey) -> int:
        """How many newer versions of its model are known here."""
        return self._versions.newer(key)

    def is_ready(self, key: SnapshotKey | None) -> bool:
        """Whether `use` would not have to wait; for what is not in memory it would."""
        if key is None or self._full.knows(key):
            return self._full.is_open(key)
        return self._residency.holds(key) and self._slots.is_open(key) and self._full.is_open(None)

    def use(self, key: SnapshotKey | None) -> AbstractAsyncContextManager[Held]:
        """The snapshot (None = the base model) is in the engine meanwhile. Yields what is held of it.

        Raises:
            InvalidRequest: it is an adapter or a full model, and this engine can run none.
            SnapshotNotFound: it is neither in memory nor in the store.
            TinsmithError: it could not be loaded.
        """
        return self._full.use(None, Held()) if key is None else self._use(key)

    @asynccontextmanager
    async def _use(self, key: SnapshotKey) -> AsyncIterator[Held]:
        if await self._is_full(key):
            self._refuse_full_models()
            async with self._full.use_of_model(key) as ticket:
                self._versions.note(key)
                yield Held(ticket)
            return
        self._refuse_adapters()
        async with AsyncExitStack() as stack:
            async with self._awaited(key):
                # The slot first: who waits for one keeps nobody from putting other weights into the engine.
                # Adapters belong to the base model.
                held = Held(await stack.enter_async_context(self._slots.use(key)))
                stack.callback(self._let_go, held.keys)
                held.adapter = await self._hold(held, key)
            async with self._full.use(None, held):
                yield held

    @asynccontextmanager
    async def change(self, held: Held, key: SnapshotKey) -> AsyncIterator[Adapter]:
        """In a `use` of an adapter, has another one in the engine too meanwhile, and afterwards instead.

        Raises:
            InvalidRequest: it is a full model.
            TinsmithError: as `use`. The adapter that was held is held as before.
        """
        if await self._is_full(key):
            raise InvalidRequest(f"snapshot {key} is no adapter", "full_models_not_supported")
        former = list(held.keys)
        async with self._awaited(key):
            # Into memory first: where that fails the slot is what it was.
            held.adapter = await self._hold(held, key)
        async with self._slots.change(held.ticket, key):
            yield held.adapter
        held.keys[:] = [key]
        self._let_go(former)

    async def update(self, held: Held, key: SnapshotKey) -> None:
        """In a `use` of a full model, waits until these or newer weights of it have taken its place. When
        it is cancelled they may do so all the same, unless newer ones are asked for. Raises as `use`, and
        nothing has changed."""
        if not await self._is_full(key):
            raise SnapshotNotFound(f"full snapshot {key} is not there; save the weights again")
        await self._full.change(held.ticket, key)
        self._versions.note(key)

    @asynccontextmanager
    async def _awaited(self, key: SnapshotKey) -> AsyncIterator[None]:
        """A request waits for an adapter meanwhile."""
        self._residency.wait_for(key, 0 if self._residency.holds(key) else await self._stored_bytes(key))
        try:
            self._load_ahead()
            yield
        finally:
            self._residency.stop_waiting(key)
            self._load_ahead()

    async def _hold(self, held: Held, key: SnapshotKey) -> Adapter:
        """Has an adapter in memory until it is let go."""
        while (adapter_id := self._residency.acquire(key)) is None:
            await self._load(key)
        held.keys.append(key)
        self._versions.note(key)
        return Adapter(adapter_id, str(key), str(self._data_dir.snapshot(key.model_id, key.version)))

    def _let_go(self, keys: list[SnapshotKey]) -> None:
        for key in keys:
            self._residency.release(key)
        self._load_ahead()

    def _load_ahead(self) -> None:
        """Loads what will have its turn, as far as there is memory. The rest comes at its turn, when those
        that had theirs give way."""
        for key in self._residency.ahead():
            self._begin_load(key)

    def _refuse_adapters(self) -> None:
        if not self._adapts:
            raise InvalidRequest(
                "this sampler runs no adapters: it was started with --max-loras 0, or is on a CPU with a "
                "model that has routed experts or quantised files; sample the base model or, without "
                "quantised files, a fully fine-tuned one",
                "adapters_not_supported",
            )

    def _refuse_full_models(self) -> None:
        if not self._full_models:
            raise InvalidRequest(
                "this sampler runs no fully fine-tuned models, as its weights are quantised or vLLM cannot "
                "replace all of them (GPT-OSS); sample the base model or an adapter, or, where it is the "
                "former, have the operator run a sampler without --quantization",
                "full_models_not_supported",
            )

    async def _is_full(self, key: SnapshotKey) -> bool:
        if self._full.knows(key):
            return True
        if self._residency.holds(key):
            return False
        directory = self._data_dir.snapshot(key.model_id, key.version)
        return await asyncio.to_thread((directory / "config.json").is_file)

    async def _load(self, key: SnapshotKey) -> None:
        """Loads once however many requests wait; one that is cancelled does not stop the others."""
        await asyncio.shield(self._begin_load(key))

    def _begin_load(self, key: SnapshotKey) -> asyncio.Task[None]:
        def end(task: asyncio.Task[None]) -> None:
            del self._loads[key]
            if task.cancelled():
                return
            if isinstance(error := task.exception(), Exception):
                # Whose turn comes tries again, and fails with it.
                self._residency.failed(key)
                self._unloaded.failed(str(key), error)
            else:
                self._unloaded.over(str(key))

        task = self._loads.get(key)
        if task is None:
            task = self._loads[key] = asyncio.create_task(self._load_from_store(key), name=f"load {key}")
            task.add_done_callback(end)
        return task

    async def _stored_bytes(self, key: SnapshotKey) -> int:
        """Bytes of an adapter's tensors in the store.

        Raises:
            SnapshotNotFound: it is not there.
        """
        directory = self._data_dir.snapshot(key.model_id, key.version)
        try:
            return (await asyncio.to_thread((directory / "adapter_model.safetensors").stat)).st_size
        except FileNotFoundError as error:
            raise SnapshotNotFound(
                f"snapshot {key} is neither in memory nor in the snapshot store; save the weights again"
            ) from error

    async def _load_from_store(self, key: SnapshotKey) -> None:
        stored = await self._stored_bytes(key)
        adapter_id = self._residency.new_adapter_id()
        directory = self._data_dir.snapshot(key.model_id, key.version)
        try:
            await self._drop(self._residency.load(key, stored))
            nbytes = await self._take(
                adapter_id, self._engine.load_adapter(adapter_id, str(directory), LOAD_TIMEOUT_S)
            )
        finally:
            self._residency.loaded(key)
        await self._note(key, adapter_id, nbytes, "store")
        log.info("loaded snapshot %s from the store (%d bytes)", key, nbytes)

    async def join_group(
        self, epoch: int, first_rank: int, world_size: int, medium: Medium, seconds: float
    ) -> None:
        """Makes the workers members of weight group `epoch`, leaving the present one. What they receive at
        present arrives first.

        Raises:
            StillReceiving: that takes more than half of the time.
        """
        began = time.monotonic()
        try:
            async with asyncio.timeout(seconds / 2):
                await self._receiving.acquire()
        except TimeoutError as error:
            raise StillReceiving(
                f"not in weight group {epoch}: receiving from {self.group_epoch}; join later"
            ) from error
        try:
            self.group_epoch = 0
            left = seconds - (time.monotonic() - began)
            await self._engine.join_group(epoch, first_rank, world_size, medium, left)
            self.group_epoch = epoch
        finally:
            self._receiving.release()
        log.info("joined weight group %d (%s) as rank %d of %d", epoch, medium, first_rank, world_size)

    async def receive(self, incoming: IncomingSnapshot) -> None:
        """Receives a snapshot over the weight group; it can be used once this returns.

        A failure, or a caller that went away, breaks the group: the trainer makes a new one.

        Raises:
            NotInGroup: the workers are in another group or in none.
            DataLoss, DeadlineExceeded, InvalidRequest: as Engine.receive_adapter.
        """
        self._versions.note(incoming.key)
        async with self._receiving:
            if incoming.epoch != self.group_epoch:
                raise NotInGroup(
                    f"not in weight group {incoming.epoch} but in {self.group_epoch}; join again"
                )
            try:
                if not (self._full_models if incoming.rank is None else self._adapts):
                    # The others wait for this member.
                    await self._full.let_pass(incoming)
                elif incoming.rank is None:
                    await self._full.receive(incoming)
                else:
                    await self._receive_adapter(incoming, incoming.rank)
            except TinsmithError as error:
                self._not_arrived.failed(incoming.key.model_id, error)
                # An adapter that does not fit arrived whole: the group is sound.
                if not isinstance(error, InvalidRequest):
                    self._leave(incoming.epoch)
                raise
            except asyncio.CancelledError:
                self._leave(incoming.epoch)
                raise
        self._not_arrived.over(incoming.key.model_id)
        log.info("received snapshot %s", incoming.key)

    async def _receive_adapter(self, incoming: IncomingSnapshot, rank: int) -> None:
        adapter_id = self._residency.new_adapter_id()
        nbytes = await self._take(
            adapter_id,
            self._engine.receive_adapter(
                adapter_id, incoming.epoch, rank, incoming.layout, incoming.checksum, incoming.timeout
            ),
        )
        await self._note(incoming.key, adapter_id, nbytes, "broadcast")

    async def _take(self, adapter_id: int, arrival: object) -> int:
        """Waits for an adapter to arrive on all workers, or drops it from those that have it."""
        try:
            return await arrival  # type: ignore[misc]
        except BaseException:
            self._own(self._engine.drop_adapters([adapter_id]))
            raise

    async def _note(self, key: SnapshotKey, adapter_id: int, nbytes: int, way: str) -> None:
        second = self._residency.holds(key)
        dropped = self._residency.add(key, adapter_id, nbytes)
        ARRIVED.labels(way).inc()
        # Of two copies one goes at once, and is no loss.
        await self._drop(dropped, evicted=len(dropped) - second)

    async def _drop(self, adapter_ids: list[int], evicted: int | None = None) -> None:
        """Frees adapters that gave way. evicted: how many of them were resident; None = all."""
        RESIDENT.set(len(self._residency.keys()))
        EVICTED.inc(len(adapter_ids) if evicted is None else evicted)
        if adapter_ids:
            await self._engine.drop_adapters(adapter_ids)

    def _leave(self, epoch: int) -> None:
        if self.group_epoch == epoch:
            self.group_epoch = 0
            self._own(self._engine.leave_group())

    def _own(self, work: object) -> None:
        """Runs a clean-up that must not die with the call that caused it."""
        task: asyncio.Task[None] = asyncio.create_task(work)  # type: ignore[arg-type]
        self._cleanups.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._cleanups.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._unclean.failed("the engine", error)
