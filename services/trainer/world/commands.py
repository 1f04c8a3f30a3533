"""What rank 0 tells the ranks of a trainer world to do.

Invariant: a command holds all that a rank needs to carry it out (msgpack, never pickle), so ranks share no
memory; of files they share the saved states of models that train all weights, which are named to them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from services.common.contract.errors import TinsmithError
from services.common.process import failpoints
from services.trainer.compute.data import AdamSpec, LoraSpec, ModelState, Pass, ShardedState
from services.trainer.compute.engine import Engine
from services.trainer.compute.memory.failures import LacksMemory, is_out_of_memory


class CreateModel(msgspec.Struct, frozen=True, tag=True):
    """A fresh model, or one with saved values. `lora` None: it trains all weights."""

    model_id: str
    seq_id: int
    lora: LoraSpec | None
    saved: ModelState | ShardedState | None = None
    optimizer: bool = False


class DropModel(msgspec.Struct, frozen=True, tag=True):
    model_id: str


class MoveAdapter(msgspec.Struct, frozen=True, tag=True):
    """An idle adapter leaves the device for the host, or comes back. Answered by whether it did."""

    model_id: str
    to_host: bool


class RunPass(msgspec.Struct, frozen=True, tag=True):
    plan: Pass


class ModelStep(msgspec.Struct, frozen=True):
    """An optimizer step of one model."""

    model_id: str
    seq_id: int
    adam: AdamSpec


class OptimSteps(msgspec.Struct, frozen=True, tag=True):
    """Optimizer steps of different models. Each is answered by its metrics, or the error that refused it."""

    steps: list[ModelStep]


class LoadState(msgspec.Struct, frozen=True, tag=True):
    model_id: str
    seq_id: int
    saved: ModelState | ShardedState
    optimizer: bool


class ReadState(msgspec.Struct, frozen=True, tag=True):
    """What a model is, as far as it is spread over the ranks, for rank 0: as `Engine.snapshot`."""

    model_id: str
    optimizer: bool


class WriteState(msgspec.Struct, frozen=True, tag=True):
    """Every rank writes its part of the state of a model that trains all weights into a new directory."""

    model_id: str
    directory: str


class Tick(msgspec.Struct, frozen=True, tag=True):
    """Keeps ranks that wait for a command from running into their deadline, and has them give back what they
    keep for it in vain."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """The other ranks end."""


Command = (
    CreateModel
    | DropModel
    | MoveAdapter
    | RunPass
    | OptimSteps
    | LoadState
    | ReadState
    | WriteState
    | Tick
    | Shutdown
)


def apply(engine: Engine, command: Command) -> Any:
    """Carries a command out on this rank and returns what the engine answers."""
    match command:
        case CreateModel():
            return _create(engine, command)
        case DropModel():
            return engine.drop_model(command.model_id)
        case MoveAdapter():
            return engine.move_adapter(command.model_id, to_host=command.to_host)
        case RunPass():
            failpoints.hit("trainer.before_pass")
            rows = engine.run_pass(command.plan)
            failpoints.hit("trainer.after_pass")
            return rows
        case OptimSteps():
            failpoints.hit("trainer.before_step")
            found = _step(engine, command.steps)
            failpoints.hit("trainer.after_step")
            return found
        case LoadState():
            return _load(engine, command)
        case ReadState():
            return engine.snapshot(command.model_id, optimizer=command.optimizer)
        case WriteState():
            return engine.write_state(command.model_id, command.directory)
        case Tick():
            return engine.page_locked.tidy()
        case Shutdown():
            return None


def refused(command: Command, answer: Any) -> str:
    """What of a command was refused though it was carried out, in a form that ranks can compare."""
    if not isinstance(command, OptimSteps):
        return ""
    codes = [each.code if isinstance(each, TinsmithError) else "" for each in answer]
    return f"refused {zlib.crc32(','.join(codes).encode()):08x}" if any(codes) else ""


def leaves_others_waiting(command: Command, error: Exception, ranks: int) -> bool:
    """Whether a rank on which a command breaks off may leave others in a collective that it never comes to.
    What all of them refuse alike is found before there is any."""
    refused = isinstance(error, TinsmithError) and not isinstance(command, RunPass)
    if isinstance(command, CreateModel):
        # With a state that ranks read together, or out of memory that all of them had before: what else is
        # wrong with a model that trains all weights all of them run into alike.
        together = isinstance(command.saved, ShardedState) or (ranks > 1 and is_out_of_memory(error))
        return command.lora is None and together and not refused
    return isinstance(command, MoveAdapter | RunPass | OptimSteps | LoadState | ReadState) and not refused


@contextmanager
def _not_halfway(operation: tuple[str, int], why: str) -> Iterator[None]:
    """Within it weights may be half changed, for want of memory that was there before it began.

    Raises:
        LacksMemory: so it is.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise LacksMemory(0, operation, why) from error


def _step(engine: Engine, steps: list[ModelStep]) -> list[dict[str, float] | TinsmithError]:
    """As `Engine.optim_steps`; a step that was taken alone is told of as one that lacks memory."""
    due = [(step.model_id, step.adam) for step in steps]
    if len(steps) != 1:
        return engine.optim_steps(due)
    why = (
        "out of memory in the middle of an optimizer step, which is not taken; have the operator give the "
        "trainer more memory, or --offload-optimizer cpu for models that train all weights, then send it "
        "again"
    )
    with _not_halfway((steps[0].model_id, steps[0].seq_id), why):
        return engine.optim_steps(due)


def _load(engine: Engine, command: LoadState) -> None:
    why = (
        "out of memory in the middle of a load, which is not done; have the operator give the trainer more "
        "memory, then send it again"
    )
    with _not_halfway((command.model_id, command.seq_id), why):
        engine.load_state(command.model_id, command.saved, command.optimizer)


def _create(engine: Engine, command: CreateModel) -> None:
    # To draw what a state replaces takes about as long as to load that, and nobody trains meanwhile.
    engine.create_model(command.model_id, command.lora, drawn=command.saved is None)
    if command.saved is not None:
        try:
            engine.load_state(command.model_id, command.saved, command.optimizer)
        except Exception:
            engine.drop_model(command.model_id)
            raise
