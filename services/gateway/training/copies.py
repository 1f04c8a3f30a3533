"""Copies of checkpoints: runs of their own that hold one checkpoint and cannot be trained on.

Invariants: a copy is found whole or not at all, and from then on nothing that becomes of its source touches
it. A request that is repeated finds the copy that it made, or joins it while it is made, at whichever gateway
and however long that takes. A copy that fails leaves no run and no session; its files are due from before
they were made. A copy that is given up ends with the file, or piece of one, that is being copied, and its
claim is not given back before. A thread that comes free makes the copy of the waiting owner who has the
fewest under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
from redis.exceptions import RedisError

from services.common.contract import ids
from services.common.contract.errors import (
    Cancelled,
    Conflict,
    DeadlineExceeded,
    Draining,
    NotFound,
    TinsmithError,
    Unavailable,
)
from services.common.process import clock
from services.common.process.pools import COPIES, COPY_THREADS
from services.common.process.tasks import cancel_all
from services.common.storage.base import GoOn, Key, Storage, failure
from services.common.storage.data_dir import DataDir
from services.common.storage.directory import directory_bytes, linked_files, publish_directory
from services.gateway.access.gate import Gate
from services.gateway.access.limits import Limits
from services.gateway.access.turns import Turns
from services.gateway.checkpoints.checkpoints import Checkpoints
from services.gateway.cluster.redis_restart import RedoLog
from services.gateway.records.checkpoint import CheckpointRecord, key_of
from services.gateway.records.model import ModelRecord
from services.gateway.records.stores import Stores
from services.gateway.sessions.sessions import NewSession, Sessions
from services.gateway.training.copy_claims import CopyClaims, taken_over
from services.gateway.training.request_digest import digest

log = logging.getLogger(__name__)

_PATIENCE_S = 300.0
"""So long a request waits for its copy."""
_MOST_S = 24 * 3600.0
"""A copy that takes longer hangs in a storage that does not answer."""
_END_S = 2.0
"""A gateway that ends waits so long for copies that were given up; the claims of those that hang expire."""


@dataclass(frozen=True)
class Wanted:
    """What is to be copied.

    Attributes:
        path: of the checkpoint.
        ttl_seconds: after which the copy expires; None = never.
        reader: whose checkpoint it may be, if not the caller's.
    """

    path: str
    ttl_seconds: int | None = None
    reader: str | None = None


@dataclass(frozen=True)
class _Job:
    """A copy that is to be made.

    Attributes:
        run: what holds it.
        alone: the session of the run was made for it, with this key.
    """

    wanted: Wanted
    source: CheckpointRecord
    run: ModelRecord
    alone: bool = False
    idempotency_key: str | None = None

    def __str__(self) -> str:
        return f"copy of {self.wanted.path}"

    @property
    def key(self) -> Key:
        return Key(self.run.model_id, self.source.checkpoint_id, self.source.version)

    @property
    def path(self) -> str:
        return ids.tinker_path(self.run.model_id, self.source.checkpoint_id)

    def record(self, now: float) -> CheckpointRecord:
        """Of the copy, made now."""
        ttl = self.wanted.ttl_seconds
        return msgspec.structs.replace(
            self.source,
            model_id=self.run.model_id,
            owner=self.run.owner,
            public=False,
            created_at=now,
            expires_at=None if ttl is None else now + ttl,
        )


class Copies:
    """Copies checkpoints.

    Args:
        storage: of training checkpoints and exports.
        data: where the snapshots of sampler checkpoints are.
        gate: counts a copy as a download of its owner for as long as it is made.
    """

    def __init__(
        self,
        stores: Stores,
        sessions: Sessions,
        checkpoints: Checkpoints,
        storage: Storage,
        data: DataDir,
        limits: Limits,
        redo_log: RedoLog,
        gate: Gate,
        claims: CopyClaims,
    ) -> None:
        self._session_store = stores.sessions
        self._models = stores.models
        self._records = stores.checkpoints
        self._sessions = sessions
        self._checkpoints = checkpoints
        self._storage = storage
        self._data = data
        self._limits = limits
        self._redo_log = redo_log
        self._gate = gate
        self._claims = claims
        self._patience = _PATIENCE_S
        self._turns = Turns(COPIES, COPY_THREADS)
        self._making: dict[tuple[Key, str], asyncio.Task[None]] = {}
        self._copying: dict[Key, asyncio.Task[int | None]] = {}
        self._ending: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Nothing has to be started."""

    async def stop(self) -> None:
        """Gives up the copies under way; a repeated request makes them, at another gateway. Returns soon,
        also when a thread hangs: its claim expires."""
        await cancel_all(self._making.values())
        if self._ending:
            await asyncio.wait(self._ending, timeout=_END_S)

    async def into_project(
        self, owner: str, wanted: Wanted, project_id: str, idempotency_key: str | None
    ) -> str:
        """Copies a checkpoint into a project; the path of the copy.

        Args:
            idempotency_key: the same with the same request gives the same copy for a day.

        Raises:
            InvalidRequest: the path or the lifetime is none.
            NotFound: as Checkpoints.readable.
            LimitReached: the owner has as many sessions, models or checkpoints as it may, or makes as many
                copies at once.
            StorageFull, Internal: it could not be written. Nothing is left of it.
            Unavailable: it takes long and goes on; the same request joins it.
        """
        source = await self._source(owner, wanted)
        asked = digest("copy", wanted.path, project_id, wanted.ttl_seconds, idempotency_key).hex()
        key = asked if idempotency_key else None
        if not (key and await self._session_store.made_with(owner, key)):
            # Before there is a session that nothing comes of.
            await self._checkpoints.check_room(owner)
        new = NewSession(project_id=project_id, display_name=f"copy of {source.checkpoint_id}"[:128])
        session_id = await self._sessions.create(owner, new, key)
        run = _run_of(source, owner, wanted, ids.model_id(session_id, 0))
        return await self._copied(_Job(wanted, source, run, alone=True, idempotency_key=key))

    async def into_session(self, owner: str, wanted: Wanted, session_id: str, model_seq_id: int) -> str:
        """Copies a checkpoint into a session of the caller's, as its model of this number; the path of the
        copy. Raises as `into_project`, and Gone when the session is over, Conflict when the number is used.
        """
        await self._sessions.open_for_more(owner, session_id)
        source = await self._source(owner, wanted)
        run = _run_of(source, owner, wanted, ids.model_id(session_id, model_seq_id))
        return await self._copied(_Job(wanted, source, run))

    async def _source(self, owner: str, wanted: Wanted) -> CheckpointRecord:
        self._limits.check_ttl(wanted.ttl_seconds)
        return await self._checkpoints.readable(wanted.reader or owner, *ids.parse_tinker_path(wanted.path))

    async def _copied(self, job: _Job) -> str:
        """The path of a copy that is there now. The copying goes on when nobody waits any more."""
        name = (job.key, job.wanted.path)
        if name not in self._making:
            making = asyncio.create_task(self._make(job), name=f"copy to {job.key.model_id}")
            self._making[name] = making
            making.add_done_callback(lambda made: self._made(name, made))
        making = self._making[name]
        await asyncio.wait([making], timeout=self._patience)
        if not making.done():
            raise Unavailable(f"the {job} takes long and goes on; send the same request again to wait for it")
        if making.cancelled():
            raise Draining(f"the {job} was given up, as this gateway ends; send the same request again")
        making.result()
        return job.path

    def _made(self, name: tuple[Key, str], made: asyncio.Task[None]) -> None:
        del self._making[name]
        error = None if made.cancelled() else made.exception()
        if error is not None:
            log.info("copy to %s failed: %s", name[0].model_id, error)

    async def _make(self, job: _Job) -> None:
        """Makes a copy unless it is there, or waits for the gateway that does."""
        try:
            stored = await self._put_run(job)
        except TinsmithError as error:
            await self._end_session(job, error)
            raise
        if await self._record(job) is None:
            if await self._claims.take(job.key):
                try:
                    if await self._models.get(job.run.model_id) is None:
                        raise Unavailable(f"the {job} failed elsewhere; send the same request again")
                    await self._make_claimed(job)
                finally:
                    await self._give_back(job.key)
            else:
                await self._other_gateway(job)
        if stored.status == "creating":
            await self._models.set_status(job.key.model_id, "ready")
        if job.alone:
            # Nothing more is made in the session; its records stay for as long as the copy does.
            why = f"holds a copy of {job.wanted.path}"
            await self._sessions.finish(job.run.owner, job.run.session_id, "success", why)

    async def _record(self, job: _Job) -> CheckpointRecord | None:
        return await self._records.get(job.key.model_id, job.key.checkpoint_id)

    async def _other_gateway(self, job: _Job) -> None:
        """Waits while another gateway makes the copy.

        Raises:
            Unavailable: it gave up.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_MOST_S):
                await self._claims.wait(job.key)
        if await self._record(job) is None:
            raise Unavailable(f"the {job} failed at another gateway; send the same request again")

    async def _make_claimed(self, job: _Job) -> None:
        """Makes a copy that this gateway has claimed, or leaves nothing of it."""
        owner = job.run.owner
        try:
            with self._gate.download(owner):
                await self._checkpoints.check_room(owner)
                async with self._claims.kept(job.key):
                    await self._put_files(owner, key_of(job.source), job.key)
                if not await self._claims.take(job.key):
                    raise taken_over(job.key)
                if await self._models.get(job.key.model_id) is None:
                    raise Unavailable(f"the {job} lost its run meanwhile; send the same request again")
                # Its time begins now, however long it was made.
                if not await self._records.put(job.record(clock.to_note())):
                    raise Conflict(f"{job.path} was made of another version; use the next model_seq_id")
        except Exception as error:
            await self._take_back(job, error)
            raise
        log.info("%s by %s to %s", job, owner, job.key.model_id)

    async def _put_files(self, owner: str, source: Key, target: Key) -> None:
        given_up = threading.Event()

        def go_on() -> None:
            if given_up.is_set():
                raise Cancelled(f"the copy to {target.model_id} was given up")

        # A thread cannot be cancelled: it is told, and known until it has ended.
        copying = asyncio.create_task(self._turns.run(owner, self._copy_files, source, target, go_on))
        self._copying[target] = copying
        try:
            async with asyncio.timeout(_MOST_S):
                size = await asyncio.shield(copying)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"checkpoint {source.checkpoint_id} was not copied within a day; its storage hangs"
            ) from error
        except OSError as error:
            raise failure(error, f"the copy of checkpoint {source.checkpoint_id}") from error
        finally:
            given_up.set()
        if size is None:
            path = ids.tinker_path(source.model_id, source.checkpoint_id)
            raise NotFound(f"{path} does not exist any more")

    async def _give_back(self, key: Key) -> None:
        """Gives a claim back, at once or when no thread copies for it any more."""
        copying = self._copying.pop(key, None)
        if copying is None or copying.done():
            await self._claims.give_back(key)
            return
        ending = asyncio.create_task(self._give_back_after(copying, key), name=f"end of copy to {key.path}")
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def _give_back_after(self, copying: asyncio.Task[int | None], key: Key) -> None:
        await asyncio.wait([copying])
        # Else a request that was repeated here meanwhile has the claim.
        if all(made != key for made, _ in self._making):
            await self._claims.give_back(key)

    async def _take_back(self, job: _Job, error: Exception) -> None:
        """Ends what a copy that failed was to be in, unless another gateway makes it there by now; its files
        are due. What cannot be ended now ends with the silence of its session."""
        try:
            mine = await self._claims.take(job.key)
            if mine and not await self._records.any_of_model(job.key.model_id):
                await self._models.drop(job.run)
                await self._end_session(job, error)
        except (TinsmithError, RedisError) as second:
            log.warning("run %s of a copy that failed stays for now: %s", job.key.model_id, second)

    async def _end_session(self, job: _Job, error: Exception) -> None:
        if job.alone:
            await self._sessions.discard(job.run.owner, job.run.session_id, job.idempotency_key, error)

    async def _put_run(self, job: _Job) -> ModelRecord:
        """Stores the run that is to hold a copy, of which no trainer hears; what is stored."""
        run = job.run
        stored = await self._models.get(run.model_id)
        if stored is None:
            self._limits.owners.check_models(await self._models.count(run.owner))
            await self._sessions.check_room(run.owner, run)
            stored = await self._redo_log.perform(lambda: self._models.create_if_absent(run))
        if stored.copy_of != run.copy_of:
            raise Conflict(f"model {run.model_id} exists; use the next model_seq_id")
        return stored

    def _copy_files(self, source: Key, target: Key, go_on: GoOn) -> int | None:
        go_on()
        if not source.checkpoint_id.startswith("sampler_weights/"):
            return self._storage.copy(source, target, go_on)
        directory = self._data.snapshot(target.model_id, target.version)
        return _copy_snapshot(self._data.snapshot(source.model_id, source.version), directory, go_on)


def _run_of(source: CheckpointRecord, owner: str, wanted: Wanted, model_id: str) -> ModelRecord:
    return ModelRecord(
        model_id=model_id,
        session_id=ids.session_of(model_id),
        owner=owner,
        base_model=source.base_model,
        lora_rank=source.lora_rank,
        train_attn=source.train_attn,
        train_mlp=source.train_mlp,
        train_unembed=source.train_unembed,
        role=source.role,
        created_at=time.time(),
        copy_of=wanted.path,
    )


def _copy_snapshot(source: Path, target: Path, go_on: GoOn) -> int | None:
    """The bytes of a snapshot that is now in two places; None when it is gone."""
    try:
        files = linked_files(source, go_on)
        return publish_directory(target, files, replace=False, leave_reserve=True)
    except FileExistsError:
        return directory_bytes(target)
    except FileNotFoundError:
        return None
