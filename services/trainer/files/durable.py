"""Durable training snapshots: what a model comes back from after its trainer died.

Invariants: a snapshot is taken only where no gradient is pending, so the snapshot and the journal after
its seq_id are the whole model; the pointer in Redis names only a snapshot that is complete on disk; and
the one it names is deleted only after it names a newer one. Writing never holds the model up: states that
come and go while a snapshot is being written are skipped, the newest is written next. One that could not be
written is counted, and due until it is: the model is not taken for one whose state is on disk.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import msgspec
from google.protobuf.message import DecodeError
from prometheus_client import Counter, Gauge
from redis.exceptions import RedisError

from services.common.contract.errors import DataLoss, ModelBusy, TinsmithError
from services.common.process import failpoints
from services.common.state.journal import Journal
from services.common.storage.data_dir import DataDir
from services.common.storage.directory import publish_directory
from services.common.storage.model_files import delete_state
from services.common.telemetry.repeats import Repeats
from services.trainer.files.checkpoints import Meta, SavedState, read_meta, read_state, state_files
from services.trainer.files.volume import FreeBytes, Volume, other_volume
from tinsmith.v1 import results_pb2

log = logging.getLogger(__name__)

FAILED = Counter(
    "tinsmith_durable_snapshot_failures_total", "Durable snapshots that could not be written and are due"
)
VOLUME_FREE = Gauge("tinsmith_volume_free_bytes", "Free bytes of the data directory's volume")

_RESULTS = "results.msgpack"
_CONCURRENT_WRITES = 2
_KEPT_S = 10.0
_LOOK_AGAIN_S = 0.2
_SETTLED_S = 600.0
"""Whoever waits for a writer waits no longer, so that a disk that hangs holds up nobody but its writer."""
_REST = 4.0
"""Together the writers rest this many times as long as they write: training comes first."""
_LEAST_REST_S = 5.0
"""And none shorter than this: a restart takes longer than to execute again what the journal holds by then."""
_MOST_REST_S = 30.0
"""And none longer than this: until its next snapshot the journal holds what the model executes. After a write
that failed a writer rests as long."""


_EXPECTED = (TinsmithError, RedisError, OSError)
"""What the world does to a write."""


@dataclass(frozen=True)
class DurableSnapshot:
    """A model at a point without pending gradient.

    Attributes:
        results: seq_id -> result of the last operations. The journal is trimmed up to
            the snapshot, so a result that no gateway has stored yet lives on here.
    """

    saved: SavedState
    results: Mapping[int, results_pb2.OperationResult]

    @property
    def model_id(self) -> str:
        return self.saved.meta.model_id

    @property
    def seq_id(self) -> int:
        return self.saved.meta.seq_id


class DurableStore:
    """Writes and reads durable snapshots.

    Args:
        staging: as of `read_state`.
        answered: returns when what a model's newest state covers has its results.
        take: gives a model's newest snapshot, which is released here; None when the model is gone, or has
            `changed`.
        epoch_of: highest fencing epoch seen for a model.
        strayed: whether the copy of a model that is here is not what its journal comes to.
        on_durable: told (model_id, seq_id) once a snapshot is durable.
    """

    def __init__(
        self,
        data: DataDir,
        staging: Path,
        journal: Journal,
        answered: Callable[[str], Awaitable[None]],
        take: Callable[[str], Awaitable[DurableSnapshot | None]],
        epoch_of: Callable[[str], int],
        strayed: Callable[[str], bool],
        on_durable: Callable[[str, int], None],
    ) -> None:
        self._data = data
        self._volume = Volume(data)
        self._staging = staging
        self._journal = journal
        self._answered = answered
        self._take = take
        self._epoch_of = epoch_of
        self._strayed = strayed
        self._on_durable = on_durable
        self._changed: set[str] = set()
        self._writers: dict[str, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(_CONCURRENT_WRITES)
        self._hurry: dict[str, asyncio.Event] = {}
        self._draining = False
        self._failed: set[str] = set()
        """Models whose last write failed and was not begun again."""
        self._unwritten = Repeats(log, "a durable snapshot was not written")
        VOLUME_FREE.set_function(FreeBytes(data.root).read)

    def changed(self, model_id: str) -> None:
        """The model has a new state that is to be made durable soon."""
        self._changed.add(model_id)
        if model_id not in self._writers:
            self._hurry[model_id] = asyncio.Event()
            if self._draining:
                self._hurry[model_id].set()
            self._writers[model_id] = asyncio.create_task(
                self._write_all(model_id), name=f"durable {model_id}"
            )

    async def settle(self, model_id: str, wanted: Callable[[], bool] = lambda: True) -> bool:
        """Returns when nothing of this model is left to write, or that is not wanted any more: a model that
        trains on may always have something. Or when it has taken too long, or a write has failed, which
        one that rests after a failure tries first. Whether nothing is left."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + _SETTLED_S
        if model_id in self._writers:
            self._failed.discard(model_id)
        while (writer := self._writers.get(model_id)) is not None:
            if not wanted():
                return False
            if clock() > deadline:
                log.error("the snapshot of %s is still being written after %.0f s", model_id, _SETTLED_S)
                return False
            if self.failed(model_id):
                return False
            self._hurry[model_id].set()
            await asyncio.wait([writer], timeout=_LOOK_AGAIN_S)
        return not self.failed(model_id)

    def failed(self, model_id: str) -> bool:
        """Whether the model's last snapshot could not be written, and nothing of it is being written now."""
        return model_id in self._failed

    async def drain(self) -> None:
        """Returns when nothing is left to write, but what cannot be. From now on writers do not rest."""
        self._draining = True
        for hurry in self._hurry.values():
            hurry.set()
        if self._writers:
            await asyncio.wait(list(self._writers.values()))

    async def pointer(self, model_id: str) -> int | None:
        """Operation in the model's durable snapshot; None when it has none."""
        found = await self._journal.durable(model_id)
        return None if found is None else found[0]

    async def meta(self, model_id: str) -> Meta | None:
        """What the model's durable snapshot is of, without its tensors; None when it has none.

        Raises:
            DataLoss: there should be one, but its files are missing or damaged.
            Internal: they are on another volume than the one that is here.
            StorageAway: the volume hangs.
        """
        async with self._snapshot_of(model_id) as directory:
            if directory is None:
                return None
            found = await self._volume.asked(partial(read_meta, directory))
            if found is None:
                raise _missing(directory)
            return found

    async def read(self, model_id: str) -> DurableSnapshot | None:
        """The model's durable snapshot, which the caller releases; None when it has none.

        Raises:
            DataLoss: there should be one, but its files are missing or damaged.
            Internal: they are on another volume than the one that is here.
            StorageAway: the volume hangs.
        """
        async with self._snapshot_of(model_id) as directory:
            if directory is None:
                return None
            # What is large has no deadline, so a volume that hangs is asked for little before.
            await self._volume.found()
            return await asyncio.to_thread(_read, directory, self._staging)

    async def is_closed(self, model_id: str) -> bool:
        """Whether the model will never be used again."""
        return await self._journal.is_closed(model_id)

    async def delete(self, model_id: str) -> None:
        """Deletes all snapshots of a closed model that is not here any more.

        Raises:
            ModelBusy: one is still being written.
            OSError: the files cannot be deleted.
        """
        # What is still being written would appear after the deletion.
        if not await self.settle(model_id):
            raise unwritten(model_id)
        await asyncio.to_thread(delete_state, self._data, model_id)

    @asynccontextmanager
    async def _snapshot_of(self, model_id: str) -> AsyncIterator[Path | None]:
        """Where the model's durable snapshot is. What is missing on another volume than the one it was
        written to is no loss."""
        pointer = await self._journal.durable(model_id)
        if pointer is None:
            yield None
            return
        location = Path(pointer[1])
        try:
            yield self._data.state(model_id) / location.name
        except DataLoss as error:
            volume = location.parent.name
            if volume and volume != await self._volume.found():
                raise other_volume(self._data, volume) from error
            raise

    async def _write_all(self, model_id: str) -> None:
        try:
            while model_id in self._changed:
                try:
                    # Not in a slot, which others would lack meanwhile.
                    await self._answered(model_id)
                    async with self._slots:
                        self._changed.discard(model_id)
                        self._failed.discard(model_id)
                        if not self._draining:
                            # Who wanted this write, and may want nothing any more, does not hurry the next.
                            self._hurry[model_id].clear()
                        rest = await self._write_newest(model_id)
                except Exception as error:
                    # The journal keeps what the snapshot would have covered.
                    self._note_failed(model_id, error)
                    rest = _MOST_REST_S
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._hurry[model_id].wait(), rest)
        finally:
            del self._writers[model_id], self._hurry[model_id]

    def _note_failed(self, model_id: str, error: Exception) -> None:
        FAILED.inc()
        # Of many models that are to make room on a full disk, each is tried every few seconds.
        self._unwritten.failed(model_id, error, isinstance(error, _EXPECTED))
        self._failed.add(model_id)
        if not self._draining:
            self._changed.add(model_id)
            # Who hurried this write does not hurry the next.
            self._hurry[model_id].clear()

    async def _write_newest(self, model_id: str) -> float:
        """Makes the model's newest state durable; seconds until its next one should be."""
        snapshot = await self._take(model_id)
        if snapshot is None:
            return 0.0
        # Not the wait for the slot, which grows with the number of writers like the rest itself.
        clock = asyncio.get_running_loop().time
        started = clock()
        try:
            await self._write(snapshot)
            self._unwritten.over(model_id)
        finally:
            await asyncio.to_thread(snapshot.saved.release)
        rest = min(_MOST_REST_S, max(_LEAST_REST_S, _REST * len(self._writers) * (clock() - started)))
        # What is durable is not written again for want of an answer: the journal is asked after the next one.
        with suppress(RedisError):
            if await self._journal.is_half_full(model_id):
                return 0.0
        return rest

    async def _in_good_time(self, model_id: str, writing: Coroutine[None, None, None]) -> None:
        """Waits for a write, which nothing can cut short; one that hangs is told of as one that failed."""
        work = asyncio.create_task(writing, name=f"write {model_id}")
        while not (await asyncio.wait([work], timeout=_SETTLED_S))[0]:
            FAILED.inc()
            log.error("the snapshot of %s is still being written after %.0f s", model_id, _SETTLED_S)
        work.result()

    async def _write(self, snapshot: DurableSnapshot) -> None:
        model_id, seq_id = snapshot.model_id, snapshot.seq_id
        epoch = self._epoch_of(model_id)
        # Another trainer may write the same operation's snapshot: under another epoch, so elsewhere.
        location = f"{seq_id}-{epoch}"
        parent = self._data.state(model_id)
        writing = asyncio.to_thread(_write_files, parent / location, snapshot, self._volume)
        await self._in_good_time(model_id, writing)
        await failpoints.reach("trainer.before_pointer")
        if self._strayed(model_id):
            log.warning("durable snapshot of %s at %d is not what its journal comes to", model_id, seq_id)
            return
        # Writing may take minutes, and a gateway that takes the lease meanwhile goes on with the same copy.
        epoch = max(epoch, self._epoch_of(model_id))
        if not await self._journal.mark_durable(model_id, epoch, seq_id, f"{self._volume.id}/{location}"):
            log.warning(
                "durable snapshot of %s at %d was not marked: another gateway leads it", model_id, seq_id
            )
            return
        await failpoints.reach("trainer.after_pointer")
        self._on_durable(model_id, seq_id)
        try:
            await asyncio.to_thread(_delete_older, parent, location)
        except OSError as error:
            # The next one deletes them.
            log.warning("older durable snapshots of %s stay: %s", model_id, error)


def unwritten(model_id: str) -> ModelBusy:
    """Says that a snapshot could not be written, or not in good time."""
    return ModelBusy(
        f"the snapshot of model {model_id} is not written yet; look whether the trainer's data directory has "
        "space and takes writes, and into its log"
    )


def _write_files(target: Path, snapshot: DurableSnapshot, volume: Volume) -> None:
    # What is written into the directory below a volume is hidden once that is mounted again.
    volume.check()
    files = state_files(snapshot.saved)
    results = msgspec.msgpack.encode(
        {seq_id: result.SerializeToString() for seq_id, result in snapshot.results.items()}
    )
    files[_RESULTS] = lambda path: path.write_bytes(results)
    publish_directory(target, files, replace=True)


def _read(directory: Path, staging: Path) -> DurableSnapshot:
    saved = read_state(directory, staging)
    if saved is None:
        raise _missing(directory)
    try:
        return DurableSnapshot(saved, _read_results(directory))
    except BaseException:
        saved.release()
        raise


def _read_results(directory: Path) -> dict[int, results_pb2.OperationResult]:
    try:
        results = msgspec.msgpack.decode((directory / _RESULTS).read_bytes(), type=dict[int, bytes])
        return {seq_id: results_pb2.OperationResult.FromString(result) for seq_id, result in results.items()}
    except (FileNotFoundError, msgspec.DecodeError, DecodeError) as error:
        raise DataLoss(f"{_RESULTS} in {directory.name} is damaged: {error}") from error


def _missing(directory: Path) -> DataLoss:
    return DataLoss(f"the durable snapshot of model {directory.parent.name} at {directory.name} is missing")


def _delete_older(parent: Path, current: str) -> None:
    """Keeps the current snapshot, the one before it, and what the pointer named until the last seconds, when
    the next one was written: it names one of them again should Redis lose its last second. Newer ones may be
    another trainer's."""
    written = {}
    for path in parent.iterdir():
        # Another trainer may be deleting, too.
        with suppress(FileNotFoundError):
            written[path] = path.stat().st_mtime_ns
    older = sorted(
        (path for path, at in written.items() if at < written[parent / current]), key=written.__getitem__
    )
    # By the file system's clock alone.
    recent = written[parent / current] - int(_KEPT_S * 1e9)
    for path, newer in pairwise(older):
        if written[newer] < recent:
            shutil.rmtree(path, ignore_errors=True)
