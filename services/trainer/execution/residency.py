"""Brings models back from their durable snapshots, takes those snapshots, and lets models go.

Invariant: a restored model is exactly what its snapshot says, results of its last operations included;
a snapshot is taken only once every operation it covers has its result; a model leaves the memory only when
nothing of it is running; and one that another trainer took further is not gone on with.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path

from prometheus_client import Counter

from services.common.contract.errors import (
    Internal,
    ModelBusy,
    ModelNotResident,
    ModelOpen,
    SnapshotNotFound,
    TinsmithError,
)
from services.common.process import failpoints
from services.common.process.crashes import CrashLedger
from services.common.state.journal import Journal
from services.common.storage.data_dir import DataDir
from services.common.storage.model_files import delete_snapshots
from services.trainer.compute.data import LoraSpec
from services.trainer.execution.adapter_room import AdapterRoom
from services.trainer.execution.full_models import FullModels
from services.trainer.execution.host_room import HostRoom
from services.trainer.execution.resident_models import Model, OperationResult, new_sequence
from services.trainer.execution.states import States
from services.trainer.files.copy_room import LoadRoom
from services.trainer.files.durable import DurableSnapshot, DurableStore, unwritten
from services.trainer.world.channel import WorldFailure
from services.trainer.world.commands import CreateModel, DropModel, MoveAdapter
from services.trainer.world.world import World

log = logging.getLogger(__name__)

EVICTED = Counter("tinsmith_models_evicted_total", "Models that left the memory and come back when needed")
RELOADED = Counter("tinsmith_models_reloaded_total", "Models that were brought back from their snapshots")

Evict = Callable[[Model, TinsmithError], None]
_LOOK_AGAIN_S = 0.05
_PATIENCE_S = 1.0
"""With which a snapshot that was taken waits for results, and a model that is here for its snapshot."""
AT_ONCE = 4
"""Models whose states are read at once: after a start all of them are asked for together."""
_RESTORE = -1
"""In the place of an operation's seq_id."""


class Restores:
    """Whose turn it is to be brought back: few are at once.

    One that was being brought back when the trainer died is brought back while no other is, so that those are
    not blamed with it; after MOST_CRASHES such deaths in a row it rests (`CrashLedger`), and everything else
    goes on without it. Nothing of it is lost: it waits.

    Args:
        crashes: what was under way when a predecessor died.
        loads: room on the host for their states.
    """

    def __init__(self, crashes: CrashLedger[tuple[str, int]], loads: LoadRoom) -> None:
        self._crashes = crashes
        self._loads = loads
        self._reading = asyncio.Semaphore(AT_ONCE)
        self._suspects = asyncio.Lock()

    def check(self, model_id: str) -> None:
        """Whether a model may be brought back now.

        Raises:
            Internal: it rests.
        """
        given_up = self._crashes.verdict((model_id, _RESTORE))
        if given_up is not None:
            deaths = self._crashes.deaths((model_id, _RESTORE))
            raise Internal(
                f"the trainer died {deaths} times in a row while it brought model {model_id} back; it tries "
                "again within an hour, or when it is restarted in order. Its log says what it died of",
                given_up.code,
            )

    @asynccontextmanager
    async def turn(self, model_id: str, lora: LoraSpec | None) -> AsyncIterator[None]:
        """Within it a model is read and brought back. Waits for its turn, and for room on the host; raises
        Overloaded when that took too long."""
        key = (model_id, _RESTORE)
        async with AsyncExitStack() as held:
            if suspect := self._crashes.is_suspect(key):
                # One suspect at a time waits for all places.
                await held.enter_async_context(self._suspects)
            for _ in range(AT_ONCE if suspect else 1):
                await held.enter_async_context(self._reading)
            await held.enter_async_context(self._loads.of_snapshots.hold(self._loads.bytes_of(lora)))
            self._crashes.begin([key])
            try:
                yield
            except Exception as error:
                # What broke the world is not over: the process ends of it.
                if not isinstance(error, WorldFailure):
                    self._crashes.end([key])
                raise
            self._crashes.end([key])
            self._crashes.survived(key)


class Residency:
    """Which models are here.

    Args:
        models: the trainer's models by id; restored ones are added, parked ones taken out.
        staging: this trainer's.
        max_full_models: models that train all weights which may be here at once.
        adapter_bytes: that adapters may take of each rank; `bytes_of`: what one takes.
        host_bytes: the same of each rank's host; `host_bytes_of`: what one takes there.
        restores: whose turn it is to come back.
    """

    def __init__(
        self,
        world: World,
        models: dict[str, Model],
        states: States,
        data: DataDir,
        staging: Path,
        journal: Journal,
        max_full_models: int,
        adapter_bytes: int,
        bytes_of: Callable[[LoraSpec], int],
        host_bytes: int,
        host_bytes_of: Callable[[LoraSpec], int],
        restores: Restores,
    ) -> None:
        self._world = world
        self._models = models
        self._states = states
        self._data = data
        self._restoring: dict[str, tuple[int, asyncio.Task[int]]] = {}
        """With the last move that each knows of."""
        self._restores = restores
        self.durable = DurableStore(
            data,
            staging,
            journal,
            self._answered,
            self._take,
            self._epoch_of,
            self._strayed,
            self._note_durable,
        )
        self.full = FullModels(models, max_full_models, self._make_way)
        host = HostRoom(models, host_bytes, host_bytes_of, self._move, self._let_go)
        self.adapters = AdapterRoom(models, adapter_bytes, bytes_of, host, self._settle, self._let_go)

    async def drain(self) -> None:
        """Makes everything durable that is not yet."""
        for model in self._models.values():
            if model.unsaved_steps:
                self.durable.changed(model.model_id)
        await self.durable.drain()

    async def restore(self, model_id: str, epoch: int, moved: int, evict: Evict) -> int:
        """Brings a model back unless it is here. Returns the operation of its durable snapshot.

        Args:
            moved: epoch of the model's last move between trainers; a copy from before is dropped, as is one
                that has strayed.
            evict: forgets a model that is here and is dropped.

        Raises:
            SnapshotNotFound: it has none.
            ModelBusy: one is still being written.
            StaleEpoch: another gateway leads the model.
            DataLoss, StorageAway: the snapshot is damaged, or its volume hangs.
            Internal: the trainer died of it several times.
        """
        model = self._models.get(model_id)
        if model is not None and not model.is_outdated(moved):
            # What is still written of it becomes durable for who leads it by now.
            model.sequence.fence(epoch)
        known, task = self._restoring.get(model_id, (moved, None))
        while task is not None and known < moved:
            # What it comes to may be from before the model moved.
            await asyncio.wait([task])
            known, task = self._restoring.get(model_id, (moved, None))
        if task is None:
            task = asyncio.create_task(
                self._restore(model_id, epoch, moved, evict), name=f"restore {model_id}"
            )
            self._restoring[model_id] = moved, task
            task.add_done_callback(lambda _: self._restoring.pop(model_id, None))
        seq_id = await asyncio.shield(task)
        if model_id in self._models:
            self._models[model_id].sequence.fence(epoch)
        return seq_id

    async def _restore(self, model_id: str, epoch: int, moved: int, evict: Evict) -> int:
        # From a newer one less is sent again; one that is here trains on where a disk or an export keeps it.
        until = time.monotonic() + _PATIENCE_S
        await self.durable.settle(model_id, lambda: time.monotonic() < until)
        model = self._models.get(model_id)
        if model is not None and not model.is_outdated(moved):
            pointer = await self.durable.pointer(model_id)
            if pointer is None:
                raise SnapshotNotFound(f"model {model_id} has no durable snapshot yet")
            if not model.sequence.is_behind(pointer):
                return pointer
        # A snapshot still being written would move the pointer under the replay. One that cannot be written
        # is only of a model that is here, and trains on.
        if not await self.durable.settle(model_id) and not self.durable.failed(model_id):
            raise unwritten(model_id)
        if (model := self._models.get(model_id)) is not None:
            await self._discard(model, evict)
        meta = await self.durable.meta(model_id)
        if meta is None:
            raise SnapshotNotFound(f"model {model_id} has no durable snapshot")
        self._restores.check(model_id)
        # Room may take a minute, so whoever waits for it has no state in memory and keeps no other out.
        if meta.lora is None:
            room: AbstractAsyncContextManager[int | None] = self.full.room(model_id)
        else:
            room = self.adapters.room(model_id, meta.lora, had_before=True)
        async with room as size, self._restores.turn(model_id, meta.lora):
            snapshot = await self.durable.read(model_id)
            if snapshot is None:
                raise SnapshotNotFound(f"model {model_id} has no durable snapshot")
            try:
                return await self._bring_back(model_id, epoch, snapshot, size or 0)
            finally:
                await asyncio.to_thread(snapshot.saved.release)

    async def _bring_back(self, model_id: str, epoch: int, snapshot: DurableSnapshot, size: int) -> int:
        seq_id, lora = snapshot.seq_id, snapshot.saved.meta.lora
        create = CreateModel(model_id, seq_id, lora, snapshot.saved.state, optimizer=True)
        model = Model(
            model_id, new_sequence(seq_id), created=True, lora=lora, adapter_bytes=size, durable_seq=seq_id
        )
        model.sequence.restore_results(snapshot.results)
        # At once, whether the caller waits for it or not: it is of after the model's last move.
        model.sequence.fence(epoch)
        await failpoints.reach("trainer.mid_restore")
        # It has its turn: others wait for that, and whoever asked for it asks again.
        await self.adapters.with_memory(size, lambda: self._world.call(create), patient=False)
        model.last_used = time.monotonic()
        self._models[model_id] = model
        RELOADED.inc()
        log.info("restored %s at operation %d", model_id, seq_id)
        return seq_id

    async def park(self, model_id: str, epoch: int, moved: int, evict: Evict) -> None:
        """Frees a model's memory, if it is here; `restore` and the journal bring it back.

        Args:
            moved, evict: as in `restore`.

        Raises:
            ModelBusy: operations of it are not done, or its snapshot could not be written.
            StaleEpoch: another gateway leads the model.
        """
        model = self._models.get(model_id)
        if model is None:
            return
        if model.is_outdated(moved):
            await self._discard(model, evict)
            return
        model.sequence.fence(epoch)
        # The newer the snapshot, the less there is to replay.
        if await self._make_way(model):
            log.info("parked %s", model_id)
        elif self.durable.failed(model_id):
            raise unwritten(model_id)
        elif self._models.get(model_id) is model:
            raise ModelBusy(f"operations of model {model_id} are not done")

    async def delete(self, model_id: str) -> None:
        """Deletes a closed model's memory and durable state.

        Raises:
            ModelOpen: it may still be brought back.
            ModelBusy: operations of it are not done, or a snapshot is still being written.
            OSError: its files cannot be deleted.
        """
        if not await self.durable.is_closed(model_id):
            raise ModelOpen(f"model {model_id} may still be used")
        model = self._models.get(model_id)
        if model is not None:
            if model.is_busy:
                raise ModelBusy(f"operations of model {model_id} are not done")
            await self._drop(model)
        await self.durable.delete(model_id)

    async def delete_snapshots(self, model_id: str, kept: Collection[int]) -> None:
        """Deletes a model's sampler snapshots but these versions. Raises OSError."""
        await asyncio.to_thread(delete_snapshots, self._data, model_id, kept)

    async def _discard(self, model: Model, evict: Evict) -> None:
        """Drops a copy that another trainer has taken further, or that is not what the journal comes to."""
        evict(model, ModelNotResident(f"model {model.model_id} went on without this copy of it"))
        # What is under way must not meet the model that comes in its place.
        while model.held:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_AGAIN_S)
        await self._world.call(DropModel(model.model_id))
        log.info("dropped %s: it went on without this copy", model.model_id)

    async def _make_way(self, model: Model, wanted: Callable[[], bool] = lambda: True) -> bool:
        """Has a model leave that may come back, unless that is not wanted any more; whether it did."""
        if not await self._settle(model, wanted):
            return False
        await self._let_go(model)
        return True

    async def _settle(self, model: Model, wanted: Callable[[], bool]) -> bool:
        """Brings a model's durable snapshot up to date; whether it is, and the model is idle and still here.
        Where that is not wanted any more the snapshot is written all the same, and nobody waits for it."""
        if model.unsaved_steps:
            model.unsaved_steps = model.unsaved_bytes = 0
            self.durable.changed(model.model_id)
        settled = await self.durable.settle(model.model_id, lambda: wanted() and self._is_idle(model))
        if self.durable.failed(model.model_id):
            # Whoever needs room asks another one first.
            model.last_used = time.monotonic()
        return settled and self._is_idle(model)

    def _is_idle(self, model: Model) -> bool:
        """Whether a model has no work, and is still here."""
        return self._models.get(model.model_id) is model and not model.is_busy

    async def _move(self, model: Model, to_host: bool) -> bool:
        return bool(await self._world.call(MoveAdapter(model.model_id, to_host)))

    async def _let_go(self, model: Model) -> None:
        """Of a model that may come back."""
        await self._drop(model)
        EVICTED.inc()

    async def _drop(self, model: Model) -> None:
        # Gone at once: an operation that arrives now is answered that the model is to be restored.
        del self._models[model.model_id]
        await self._world.call(DropModel(model.model_id))

    async def _answered(self, model_id: str) -> None:
        """Returns when all operations of a model that have been executed have their results: files of an
        export take minutes to write."""
        model = self._models.get(model_id)
        if model is not None and (unfinished := model.unfinished(up_to=model.sequence.applied)):
            await asyncio.wait(unfinished)

    async def _take(self, model_id: str) -> DurableSnapshot | None:
        model = self._models.get(model_id)
        if model is None or self._strayed(model_id):
            return None
        try:
            saved = await self._states.take(model)
        except ModelNotResident:
            return None
        try:
            results = await self._results(model, saved.meta.seq_id)
        except BaseException:
            await asyncio.to_thread(saved.release)
            raise
        if results is None:
            await asyncio.to_thread(saved.release)
            return None
        return DurableSnapshot(saved, results)

    async def _results(self, model: Model, seq_id: int) -> dict[int, OperationResult] | None:
        """Results of the last operations up to one, once it and all before have theirs; None: it is gone, or
        some of them take longer."""
        # The journal will be trimmed up to this operation, so nothing before it may still lack a result.
        unfinished = model.unfinished(up_to=seq_id)
        if unfinished:
            await asyncio.wait(unfinished, timeout=_PATIENCE_S)
        if self._models.get(model.model_id) is not model:
            return None
        if model.unfinished(up_to=seq_id):
            # They are waited for where that keeps no other model's snapshot from being written.
            self.durable.changed(model.model_id)
            return None
        return {number: result for number, result in model.sequence.results.items() if number <= seq_id}

    def _epoch_of(self, model_id: str) -> int:
        model = self._models.get(model_id)
        return model.sequence.epoch if model is not None else 0

    def _strayed(self, model_id: str) -> bool:
        model = self._models.get(model_id)
        return model is not None and model.sequence.strayed

    def _note_durable(self, model_id: str, seq_id: int) -> None:
        if (model := self._models.get(model_id)) is not None:
            model.durable_seq = seq_id
