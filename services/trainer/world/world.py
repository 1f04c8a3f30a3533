"""Commands from rank 0 to the whole trainer world.

Rank 0 decides; every rank, rank 0 included, applies the same commands in the same order to its engine,
on one thread. Commands are msgpack, broadcast over a gloo group of their own also where the engine
computes on CUDA. Invariant: after each command all ranks know that all came to the same outcome; a world
whose ranks disagree, or wait for each other beyond the deadline, ends (its process exits and is restarted).
From that moment nothing is read from it either: weights that a command has changed in part, or on some
ranks, would pass for those before the command.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from services.common.contract.errors import Internal, ModelNotResident, TinsmithError
from services.common.process.tasks import detached, unheard
from services.common.process.threads import WorkerThread
from services.trainer.compute.data import ModelState, ShardedState
from services.trainer.compute.engine import Engine
from services.trainer.compute.exchange import SLOWEST_READ, part_seconds
from services.trainer.compute.full.shards import Writing
from services.trainer.compute.lora.snapshot import Snapshot
from services.trainer.compute.memory.failures import (
    OUT_OF_MEMORY,
    NoMemory,
    is_of_device,
    is_out_of_memory,
)
from services.trainer.world.channel import Channel, WorldFailure, execute
from services.trainer.world.commands import (
    Command,
    CreateModel,
    DropModel,
    LoadState,
    ModelStep,
    OptimSteps,
    ReadState,
    RunPass,
    Tick,
    WriteState,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

TICK_S = 30.0
SLOWEST_WRITE = 5_000_000
"""Bytes of a state that a rank writes in a second, at least: a slower one counts as stuck."""

SNAPSHOTS = 2
"""Models whose snapshots are on the device at once: that takes memory which nobody counted for it."""


def _file_bytes(directory: str) -> int:
    """Of the files in a directory; none where it cannot be read, which the ranks will find out."""
    try:
        return sum(path.stat().st_size for path in Path(directory).iterdir())
    except OSError:
        return 0


def _read_only(work: Callable[[], T]) -> T:
    """What changes no model, and so fails alone where it finds no memory.

    Raises:
        Internal: it found none.
        WorldFailure: the device failed.
    """
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        if is_of_device(error):
            raise WorldFailure(f"a copy of the model broke off: {error}") from error
        if not is_out_of_memory(error):
            raise
        raise Internal(f"no memory for a copy of the model: {error}", OUT_OF_MEMORY) from error


@dataclass(eq=False)
class _DueStep:
    """A step, and what it comes to."""

    step: ModelStep
    answer: asyncio.Future[dict[str, float] | TinsmithError]


@dataclass
class _Turn:
    """When the engine's thread came to a call (time.monotonic); None: it has not. No word to the loop, which
    would take the interpreter from the thread just when that begins."""

    began: float | None = None


def _answer(due: Sequence[_DueStep], answers: Sequence[dict[str, float] | TinsmithError]) -> None:
    for each, answer in zip(due, answers, strict=True):
        # Who asked may have gone.
        if not each.answer.done():
            each.answer.set_result(answer)


class World:
    """Rank 0's handle on the world, for its event loop.

    Args:
        timeout: seconds one command may take once its turn has come; beyond it the world is given up.
    """

    def __init__(self, thread: WorkerThread, engine: Engine, channel: Channel, timeout: float) -> None:
        self._thread = thread
        self._engine = engine
        self._channel = channel
        self._timeout = timeout
        self._last_call = time.monotonic()
        self._changed_by: dict[str, int] = {}
        self._due: deque[_DueStep] = deque()
        """Steps that wait for the engine's thread, which takes all at once."""
        self._asking: asyncio.Handle | None = None
        """Will have the thread take them when all of this turn of the loop are there."""
        self._broken: WorldFailure | None = None
        """Of the engine's thread, which must see it before the next call that waits there already."""
        self._failure: asyncio.Future[None] = unheard(asyncio.get_running_loop().create_future())
        self._writing = asyncio.Lock()
        self._snapshots = asyncio.Semaphore(SNAPSHOTS)

    async def watch(self) -> None:
        """Waits until the world fails, whoever noticed it.

        Raises:
            WorldFailure: always.
        """
        await asyncio.shield(self._failure)

    async def call(self, command: Command) -> Any:
        """Has every rank carry out the command; returns rank 0's answer.

        A state is read, from files or as it is sent, for as long as its size says, beside what every command
        may take, and so are the weights that a full model is made of; a pass takes as long as its tokens say.

        Raises:
            TinsmithError: the command failed; the world goes on.
            WorldFailure: the world is broken.
        """
        longer = 0.0
        if isinstance(command, CreateModel | LoadState):
            match command.saved:
                case ShardedState() as files:
                    longer = await asyncio.to_thread(_file_bytes, files.directory) / SLOWEST_READ
                case ModelState() as sent:
                    longer = sent.nbytes / SLOWEST_READ
            if isinstance(command, CreateModel) and command.lora is None:
                longer += self._engine.sizes.base / SLOWEST_READ
        elif isinstance(command, RunPass):
            longer = part_seconds(command.plan, self._engine.world_size, self._engine.device)
        return await self._run(lambda: self._execute(command), type(command).__name__, longer)

    async def step(self, step: ModelStep) -> dict[str, float]:
        """Has every rank take an optimizer step, together with those of other models that are due; its
        metrics, as `Engine.optim_steps` says. Those that were taken together are answered in one turn of the
        loop, so that what their models have next is there at once.

        Raises:
            TinsmithError: it was refused; the gradient is gone.
            WorldFailure: the world is broken.
        """
        loop = asyncio.get_running_loop()
        due = _DueStep(step, loop.create_future())
        self._due.append(due)
        if self._asking is None:
            self._asking = loop.call_soon(self._ask_for_steps)
        waiting: list[asyncio.Future[Any]] = [due.answer, self._failure]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if not due.answer.done():
            raise WorldFailure(f"the world failed: {self._failure.exception()}")
        answer = due.answer.result()
        if isinstance(answer, TinsmithError):
            raise answer
        return answer

    @asynccontextmanager
    async def snapshot(self, model_id: str, *, optimizer: bool = True) -> AsyncIterator[tuple[int, Snapshot]]:
        """The operation that made the model's state, the last step, load or creation; and that state, as
        `Engine.snapshot`. Within the context it may take memory of the device.

        Raises:
            ModelNotResident: the engine does not have the model.
            WorldFailure: the world is broken.
        """
        async with self._snapshots:
            yield await self._run(lambda: self._read(model_id, optimizer), "state")

    async def beside(self, work: Callable[[], T]) -> T:
        """What a function comes to on a thread beside the engine's, where a snapshot comes to the host.

        Raises:
            Internal: there is no memory for it.
            WorldFailure: the world broke meanwhile, or it takes longer than any command may.
        """
        # As many as there may be snapshots at once.
        thread = WorkerThread("snapshot")
        future = unheard(asyncio.wrap_future(thread.submit(lambda: _read_only(work))))
        thread.close()
        await self._wait(future, "a snapshot", self._timeout)
        return self._found(future)

    async def state(self, model_id: str, *, optimizer: bool = True) -> tuple[int, ModelState]:
        """As `snapshot`, on the host."""
        async with self.snapshot(model_id, optimizer=optimizer) as (seq_id, snapshot):
            return seq_id, await self.beside(snapshot.state)

    async def write_state(self, model_id: str, directory: str) -> tuple[int, int]:
        """Has every rank write its part of a full model's state into a new directory; the operation that made
        the state, and its steps. Other commands go on meanwhile, but no other write: it would hold another
        copy in memory.

        Raises:
            ModelNotResident: the engine does not have the model.
            OSError: it could not be written.
            WorldFailure: the ranks did not write it together.
        """
        async with self._writing:
            seq_id, writing = await self._run(lambda: self._write(model_id, directory), "state")
            timeout = self._timeout + writing.nbytes / SLOWEST_WRITE
            done = unheard(asyncio.wrap_future(writing.done))
            await self._wait(done, "the writing of a state", timeout)
            error = done.exception()
            if error is not None and not isinstance(error, OSError):
                self._fail(WorldFailure(f"a state was not written: {error}"))
                raise WorldFailure("the ranks did not write a state") from error
            done.result()
        return seq_id, writing.step

    async def keep_alive(self) -> None:
        """Ticks while nothing else goes on. Runs until cancelled."""
        while True:
            await asyncio.sleep(TICK_S / 3)
            if time.monotonic() - self._last_call > TICK_S:
                await self.call(Tick())

    async def _run(self, function: Callable[[], T], name: str, longer: float = 0.0) -> T:
        # The steps were asked for before it.
        self._ask_for_steps()
        return await self._outcome(self._submit(function), name, longer)

    def _ask_for_steps(self) -> None:
        """Has the thread take the steps that wait for that, if any do."""
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None
            loop = asyncio.get_running_loop()
            submitted = self._submit(lambda: self._take_steps(loop))
            # A failure is the world's, and so those hear of it that wait.
            unheard(detached(self._outcome(submitted, "optimizer steps"), "optimizer steps"))

    def _submit(self, function: Callable[[], T]) -> tuple[_Turn, asyncio.Future[T]]:
        """Has the engine's thread call a function: when its turn has come, and what it came to."""
        turn = _Turn()

        def work() -> T:
            turn.began = time.monotonic()
            return self._while_whole(function)

        # Waiting does not cancel: a caller that goes away does not undo a command the ranks have.
        return turn, unheard(asyncio.wrap_future(self._thread.submit(work)))

    async def _outcome(self, submitted: tuple[_Turn, asyncio.Future[T]], name: str, longer: float = 0.0) -> T:
        seconds = left = self._timeout + longer
        turn, future = submitted
        waiting: list[asyncio.Future[Any]] = [future, self._failure]
        while left > 0:
            done, _ = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if done:
                break
            # What is before it has a deadline too, so its turn comes or the world fails.
            left = seconds if turn.began is None else turn.began + seconds - time.monotonic()
        self._check_done(future, name, seconds)
        return self._found(future)

    async def _wait(self, future: asyncio.Future[T], name: str, seconds: float) -> None:
        """Returns when something that has begun is done.

        Raises:
            WorldFailure: the world failed before, or does since this is late.
        """
        waiting: list[asyncio.Future[Any]] = [future, self._failure]
        await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        self._check_done(future, name, seconds)

    def _check_done(self, future: asyncio.Future[T], name: str, seconds: float) -> None:
        if not future.done():
            self._fail(WorldFailure(f"{name} did not finish in {seconds:g} s"))
            raise WorldFailure(f"the world failed: {self._failure.exception()}")

    def _found(self, future: asyncio.Future[T]) -> T:
        try:
            return future.result()
        except WorldFailure as error:
            self._fail(error)
            raise

    def _fail(self, error: WorldFailure) -> None:
        """Has all hear of it, unless the world failed before."""
        if not self._failure.done():
            self._failure.set_exception(error)

    def _while_whole(self, function: Callable[[], T]) -> T:
        if self._broken is not None:
            raise WorldFailure(f"the world failed before: {self._broken}")
        try:
            return function()
        except WorldFailure as error:
            self._broken = error
            raise

    def _execute(self, command: Command) -> Any:
        try:
            self._channel.send(command)
            answer = execute(self._engine, self._channel, command)
        except TinsmithError as error:
            if isinstance(command, OptimSteps):
                # Not refused but broken off: a restart brings the model back from its durable snapshot.
                raise WorldFailure(f"weights may be half changed: {error}") from error
            raise
        except WorldFailure:
            raise
        except Exception as error:
            raise WorldFailure(f"{type(command).__name__}: {type(error).__name__}: {error}") from error
        finally:
            self._last_call = time.monotonic()
        if isinstance(command, CreateModel | LoadState):
            self._changed_by[command.model_id] = command.seq_id
        elif isinstance(command, OptimSteps):
            for step, found in zip(command.steps, answer, strict=True):
                # Also where a step was refused for its gradient, that was dropped: what came before is
                # settled.
                if not isinstance(found, ModelNotResident | NoMemory):
                    self._changed_by[step.model_id] = step.seq_id
        elif isinstance(command, DropModel):
            self._changed_by.pop(command.model_id, None)
        return answer

    def _take_steps(self, loop: asyncio.AbstractEventLoop) -> None:
        """Takes the steps that are due; none if those before have taken them along."""
        due = [self._due.popleft() for _ in range(len(self._due))]
        if due:
            answers = self._execute(OptimSteps([each.step for each in due]))
            loop.call_soon_threadsafe(_answer, due, answers)

    def _read(self, model_id: str, optimizer: bool) -> tuple[int, Snapshot]:
        snapshot: Snapshot
        if self._engine.gathers(model_id, optimizer=optimizer):
            snapshot = self._execute(ReadState(model_id, optimizer))
        else:
            snapshot = _read_only(lambda: self._engine.snapshot(model_id, optimizer=optimizer))
        return self._changed_by[model_id], snapshot

    def _write(self, model_id: str, directory: str) -> tuple[int, Writing]:
        writing = self._execute(WriteState(model_id, directory))
        return self._changed_by[model_id], writing
