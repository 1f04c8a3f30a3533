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
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist

from services.common.contract.errors import Internal, ModelNotResident, TinsmithError
from services.common.process.threads import WorkerThread
from services.trainer.compute.data import ModelState, Pass, ShardedState
from services.trainer.compute.engine import Engine
from services.trainer.compute.full.shards import Writing
from services.trainer.world.commands import (
    Command,
    CreateModel,
    DropModel,
    LoadState,
    ModelStep,
    OptimSteps,
    ReadWeights,
    RunPass,
    Shutdown,
    Tick,
    WriteState,
    apply,
    refused,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

TICK_S = 30.0
SLOWEST_WRITE = 5_000_000
"""Bytes of a state that a rank writes in a second, at least: a slower one counts as stuck."""

SLOWEST_READ = 5_000_000
"""The same of reading one."""

SLOWEST_SPLIT = 10
"""Tokens that a rank computes in a second, at least, of a sequence that all compute together. What every
command may take is for micro-batches; such a sequence can be many times as long."""

_OUTCOME_BYTES = 512


def _file_bytes(directory: str) -> int:
    """Of the files in a directory; none where it cannot be read, which the ranks will find out."""
    try:
        return sum(path.stat().st_size for path in Path(directory).iterdir())
    except OSError:
        return 0


def split_seconds(work: Pass, ranks: int) -> float:
    """How much longer than a command a pass may take, for the sequences that all ranks compute together."""
    rows = (row for batch in work.micro_batches if batch.split for row in batch.rows)
    return sum(-(-row.length // ranks) for row in rows) / SLOWEST_SPLIT


class WorldFailure(Exception):
    """The world cannot go on; the process must exit."""


class Channel:
    """Carries commands and outcomes between the ranks. Blocking; one thread per rank uses it."""

    def __init__(self, rank: int, world_size: int, timeout: timedelta) -> None:
        self._rank = rank
        self._world_size = world_size
        self._group = dist.new_group(backend="gloo", timeout=timeout) if world_size > 1 else None

    def send(self, command: Command) -> None:
        """Rank 0: gives a command to the other ranks."""
        if self._group is None:
            return
        payload = bytearray(msgspec.msgpack.encode(command))
        dist.broadcast(torch.tensor([len(payload)], dtype=torch.int64), 0, self._group)
        dist.broadcast(torch.frombuffer(payload, dtype=torch.uint8), 0, self._group)

    def receive(self) -> Command:
        """Other ranks: the next command."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, 0, self._group)
        payload = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(payload, 0, self._group)
        return msgspec.msgpack.decode(payload.numpy().data, type=Command)

    def agree(self, error: Exception | None, refused: str = "") -> None:
        """All ranks: compares outcomes; raises this rank's own error when all failed alike.

        Args:
            refused: what was refused of a command that did not fail.

        Raises:
            WorldFailure: the ranks came to different outcomes.
            TinsmithError: the command failed on all ranks.
        """
        mine = refused if error is None else f"{type(error).__name__}: {error}"
        outcomes = self._exchange(mine)
        if len({outcome.partition(":")[0] for outcome in outcomes}) > 1:
            raise WorldFailure(f"ranks disagree about a command: {dict(enumerate(outcomes))}") from error
        if isinstance(error, TinsmithError):
            raise error
        if error is not None:
            log.error("a command failed on every rank", exc_info=error)
            raise Internal(mine) from error

    def _exchange(self, outcome: str) -> list[str]:
        if self._group is None:
            return [outcome]
        text = outcome.encode()[:_OUTCOME_BYTES].ljust(_OUTCOME_BYTES, b"\0")
        everyone = [torch.empty(_OUTCOME_BYTES, dtype=torch.uint8) for _ in range(self._world_size)]
        dist.all_gather(everyone, torch.frombuffer(bytearray(text), dtype=torch.uint8), self._group)
        return [tensor.numpy().tobytes().rstrip(b"\0").decode(errors="replace") for tensor in everyone]


def execute(engine: Engine, channel: Channel, command: Command) -> Any:
    """Carries out a command that every rank has and returns this rank's answer.

    Raises:
        TinsmithError: it failed, on all ranks alike.
        WorldFailure: the ranks disagree.
    """
    answer, error = None, None
    try:
        answer = apply(engine, command)
    except Exception as caught:
        if isinstance(command, RunPass):
            # Others may be in a collective that this rank never comes to, and would wait for minutes.
            raise WorldFailure(f"a pass broke off: {caught!r}") from caught
        error = caught
    channel.agree(error, "" if error is not None else refused(command, answer))
    return answer


def follow(engine: Engine, channel: Channel) -> None:
    """What ranks other than 0 do until they are dismissed."""
    while True:
        command = channel.receive()
        try:
            execute(engine, channel, command)
        except TinsmithError as error:
            log.debug("%s failed: %s", type(command).__name__, error)
        if isinstance(command, Shutdown):
            return


@dataclass(eq=False)
class _DueStep:
    """A step and what it came to."""

    step: ModelStep
    answer: dict[str, float] | TinsmithError | None = None


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
        self._broken: WorldFailure | None = None
        """Of the engine's thread, which must see it before the next call that waits there already."""
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._writing = asyncio.Lock()

    async def watch(self) -> None:
        """Waits until the world fails, whoever noticed it.

        Raises:
            WorldFailure: always.
        """
        await asyncio.shield(self._failure)

    async def call(self, command: Command) -> Any:
        """Has every rank carry out the command; returns rank 0's answer.

        A state is read from files for as long as its size says, beside what every command may take, and a
        sequence that all ranks compute takes as long as its tokens say.

        Raises:
            TinsmithError: the command failed; the world goes on.
            WorldFailure: the world is broken.
        """
        longer = 0.0
        if isinstance(command, CreateModel | LoadState) and isinstance(command.saved, ShardedState):
            longer = await asyncio.to_thread(_file_bytes, command.saved.directory) / SLOWEST_READ
        elif isinstance(command, RunPass):
            longer = split_seconds(command.plan, self._engine.world_size)
        return await self._run(lambda: self._execute(command), type(command).__name__, longer)

    async def step(self, step: ModelStep) -> dict[str, float]:
        """Has every rank take an optimizer step, together with those of other models that are due; its
        metrics, as `Engine.optim_steps` says.

        Raises:
            TinsmithError: it was refused; the gradient is gone.
            WorldFailure: the world is broken.
        """
        due = _DueStep(step)
        self._due.append(due)
        await self._run(self._take_steps, "optimizer steps")
        assert due.answer is not None
        if isinstance(due.answer, TinsmithError):
            raise due.answer
        return due.answer

    async def state(self, model_id: str, *, optimizer: bool = True) -> tuple[int, ModelState]:
        """A copy of the model's state, as `Engine.state`, and the operation that made it: the last step, load
        or creation.

        Raises:
            ModelNotResident: the engine does not have the model.
        """
        return await self._run(lambda: self._read(model_id, optimizer), "state")

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
            done = asyncio.wrap_future(writing.done)
            done.add_done_callback(lambda done: done.cancelled() or done.exception())
            waiting: list[asyncio.Future[Any]] = [done, self._failure]
            await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if not done.done() and not self._failure.done():
                self._failure.set_exception(WorldFailure(f"no state was written in {timeout:g} s"))
            if not done.done():
                raise WorldFailure(f"the world failed: {self._failure.exception()}")
            error = done.exception()
            if error is not None and not isinstance(error, OSError):
                if not self._failure.done():
                    self._failure.set_exception(WorldFailure(f"a state was not written: {error}"))
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
        seconds = self._timeout + longer
        loop = asyncio.get_running_loop()
        begun: asyncio.Future[None] = loop.create_future()

        def work() -> T:
            loop.call_soon_threadsafe(begun.set_result, None)
            return self._while_whole(function)

        # Waiting does not cancel: a caller that goes away does not undo a command the ranks have.
        future: asyncio.Future[Any] = asyncio.wrap_future(self._thread.submit(work))
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        waiting: list[asyncio.Future[Any]] = [begun, self._failure]
        # What is before it has a deadline too, so its turn comes or the world fails.
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if begun.done():
            waiting[0] = future
            await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if not future.done() and not self._failure.done():
            self._failure.set_exception(WorldFailure(f"{name} did not finish in {seconds:g} s"))
        if not future.done():
            raise WorldFailure(f"the world failed: {self._failure.exception()}")
        try:
            return future.result()
        except WorldFailure as error:
            if not self._failure.done():
                self._failure.set_exception(error)
            raise

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
            broke_off = isinstance(command, LoadState) and isinstance(error, Internal)
            if broke_off or isinstance(command, OptimSteps):
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
                # Also where a step was refused the gradient was dropped: what came before is settled.
                if not isinstance(found, ModelNotResident):
                    self._changed_by[step.model_id] = step.seq_id
        elif isinstance(command, DropModel):
            self._changed_by.pop(command.model_id, None)
        return answer

    def _take_steps(self) -> None:
        """Takes the steps that are due; none if those before have taken them along."""
        due = [self._due.popleft() for _ in range(len(self._due))]
        if due:
            answers = self._execute(OptimSteps([each.step for each in due]))
            for each, answer in zip(due, answers, strict=True):
                each.answer = answer

    def _read(self, model_id: str, optimizer: bool) -> tuple[int, ModelState]:
        if self._engine.gathers_weights(model_id):
            state = self._execute(ReadWeights(model_id))
        else:
            state = self._engine.state(model_id, optimizer=optimizer)
        return self._changed_by[model_id], state

    def _write(self, model_id: str, directory: str) -> tuple[int, Writing]:
        writing = self._execute(WriteState(model_id, directory))
        return self._changed_by[model_id], writing
