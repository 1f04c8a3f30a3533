"""What rank 0 tells the ranks of a trainer world to do.

Invariant: a command holds all that a rank needs to carry it out (msgpack, never pickle), so ranks share
neither files nor memory.
"""

from __future__ import annotations

from typing import Any

import msgspec

from services.common.process import failpoints
from services.trainer.compute.data import AdamSpec, LoraSpec, ModelState, Pass
from services.trainer.compute.engine import Engine


class CreateModel(msgspec.Struct, frozen=True, tag=True):
    """A fresh model, or one with saved values. `lora` None: it trains all weights."""

    model_id: str
    seq_id: int
    lora: LoraSpec | None
    saved: ModelState | None = None
    optimizer: bool = False


class DropModel(msgspec.Struct, frozen=True, tag=True):
    model_id: str


class RunPass(msgspec.Struct, frozen=True, tag=True):
    plan: Pass


class OptimStep(msgspec.Struct, frozen=True, tag=True):
    model_id: str
    seq_id: int
    adam: AdamSpec


class LoadState(msgspec.Struct, frozen=True, tag=True):
    model_id: str
    seq_id: int
    saved: ModelState
    optimizer: bool


class ReadState(msgspec.Struct, frozen=True, tag=True):
    model_id: str
    optimizer: bool


class Tick(msgspec.Struct, frozen=True, tag=True):
    """Nothing; keeps ranks that wait for a command from running into their deadline."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """The other ranks end."""


Command = CreateModel | DropModel | RunPass | OptimStep | LoadState | ReadState | Tick | Shutdown


def for_followers(command: Command) -> Command:
    """The command as the other ranks get it: a full model's tensors reach them while it is loaded."""
    saved = command.saved if isinstance(command, CreateModel | LoadState) else None
    if saved is None or saved.lora is not None:
        return command
    bare = msgspec.structs.replace(saved, adapter={}, optimizer={})
    return msgspec.structs.replace(command, saved=bare)


def apply(engine: Engine, command: Command) -> Any:
    """Carries a command out on this rank and returns what the engine answers."""
    match command:
        case CreateModel():
            return _create(engine, command)
        case DropModel():
            return engine.drop_model(command.model_id)
        case RunPass():
            failpoints.hit("trainer.before_pass")
            rows = engine.run_pass(command.plan)
            failpoints.hit("trainer.after_pass")
            return rows
        case OptimStep():
            failpoints.hit("trainer.before_step")
            metrics = engine.optim_step(command.model_id, command.adam)
            failpoints.hit("trainer.after_step")
            return metrics
        case LoadState():
            return engine.load_state(command.model_id, command.saved, command.optimizer)
        case ReadState():
            return engine.state(command.model_id, optimizer=command.optimizer)
        case Tick() | Shutdown():
            return None


def _create(engine: Engine, command: CreateModel) -> None:
    engine.create_model(command.model_id, command.lora)
    if command.saved is not None:
        try:
            engine.load_state(command.model_id, command.saved, command.optimizer)
        except Exception:
            engine.drop_model(command.model_id)
            raise
