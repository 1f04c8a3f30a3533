"""The models a trainer holds and the operations they have queued. Plain data.

Invariant: `Model.sequence` alone decides what may run next; `held` says that something of the model is
still going on which the next operation must wait for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from services.common.contract.errors import TinsmithError
from services.common.process.tasks import unheard
from services.common.telemetry.owner_class import LIGHT
from services.common.telemetry.subject import Subject
from services.trainer.compute.data import LoraSpec, RowResult
from services.trainer.convert import Export, Forward, Publish, Unload, Work
from services.trainer.order.anticipation import Habit
from services.trainer.order.scheduler import QueuedOp, UnitRef
from services.trainer.order.sequencer import Sequence
from tinsmith.v1 import results_pb2

OperationResult = results_pb2.OperationResult


@dataclass(frozen=True)
class Rejected:
    """An operation that could not be understood; it takes its place in the order and fails."""

    error: TinsmithError


@dataclass(kw_only=True, eq=False)
class Operation(QueuedOp):
    """One admitted operation.

    Attributes:
        size: bytes of the request.
        result: resolves when the operation is done. Whoever waits while it is put off is told so, and asks
            again: it is another one then.
        rows: results of a forward so far, by datum.
        failed: why a forward failed, if it did.
        admitted: when it was, in seconds of the monotonic clock.
        subject: the call that it was accepted from.
        owner_class: of its owner, when it was admitted.
        tries: how often it was put off.
        away_since: when it was first, in seconds of the monotonic clock.
    """

    model_id: str
    work: Work | Rejected
    size: int
    result: asyncio.Future[OperationResult]
    rows: dict[int, RowResult] = field(default_factory=dict)
    failed: TinsmithError | None = None
    admitted: float = field(default_factory=time.monotonic)
    subject: Subject = field(default_factory=Subject)
    owner_class: str = LIGHT
    tries: int = 0
    away_since: float = 0.0

    @property
    def is_complete(self) -> bool:
        """Whether a forward has nothing left to run."""
        return isinstance(self.work, Forward) and (
            self.failed is not None or len(self.rows) == len(self.work.data)
        )


def new_result() -> asyncio.Future[OperationResult]:
    """The result of an operation, before it is there."""
    # A caller may have gone away.
    return unheard(asyncio.get_running_loop().create_future())


def new_sequence(applied: int = -1) -> Sequence[Operation, OperationResult]:
    """The order of a model whose last executed operation is this one."""
    return Sequence(applied, OperationResult.ByteSize)


@dataclass(eq=False)
class Model:
    """One model.

    Attributes:
        created: it exists on the engine.
        lora: shape of its adapter; None of a model that trains all weights, and before it is created.
        adapter_bytes: that its adapter takes of each rank, gradient and moments included; 0 = it has none.
        host_bytes: that it takes of each rank's host, where it is then and not on the device; 0 = it is not.
        leaving: it is on its way there, and its room on the device is not free yet.
        broken: why it could not be created; every later operation fails with this.
        held: a control operation of the model is executing, or it comes back from the host.
        rests: its next operation is put off for a while.
        publishing: a snapshot or an export is on its way; another one waits for it, and so does an unload:
            what has no result yet when its model goes never gets one.
        durable_seq: operation in the newest durable snapshot; -1 = none.
        unsaved_steps: optimizer steps since the last snapshot was asked for.
        unsaved_bytes: size of the operations that ended since then.
        last_used: `time.monotonic()` when it was created or last had an operation.
        habit: how soon it asks for its next batch after a step.
    """

    model_id: str
    sequence: Sequence[Operation, OperationResult] = field(default_factory=new_sequence)
    created: bool = False
    lora: LoraSpec | None = None
    adapter_bytes: int = 0
    host_bytes: int = 0
    leaving: bool = False
    broken: TinsmithError | None = None
    held: bool = False
    rests: bool = False
    publishing: bool = False
    durable_seq: int = -1
    unsaved_steps: int = 0
    unsaved_bytes: int = 0
    last_used: float = field(default_factory=time.monotonic)
    habit: Habit = field(default_factory=Habit)

    @property
    def is_full(self) -> bool:
        """Whether it trains all weights."""
        return self.created and self.lora is None

    def is_outdated(self, moved: int) -> bool:
        """Whether this copy is not the model any more, which moved between trainers last at an epoch."""
        return self.sequence.strayed or self.sequence.epoch < moved

    @property
    def is_busy(self) -> bool:
        """Whether anything of it is still going on."""
        return bool(self.sequence.unfinished) or self.held or self.publishing

    @property
    def is_wanted(self) -> bool:
        """Whether it is on the host and its next operation waits for it to come back."""
        ready = self.sequence.ready
        return self.host_bytes > 0 and bool(ready) and not isinstance(ready[0].work, Unload | Rejected)

    def runnable(self) -> Iterable[Operation]:
        """Operations the scheduler may choose from, in order."""
        ready = self.sequence.ready
        if (
            self.held
            or self.rests
            or self.is_wanted
            or (self.publishing and ready and isinstance(ready[0].work, Publish | Export | Unload))
        ):
            return ()
        return ready

    def find(self, ref: UnitRef) -> Operation:
        """The queued operation of a unit."""
        return next(op for op in self.sequence.ready if op.seq_id == ref.seq_id)

    def unfinished(self, up_to: int) -> list[asyncio.Future[OperationResult]]:
        """Results not there yet of operations up to a seq_id."""
        return [op.result for seq_id, op in self.sequence.unfinished.items() if seq_id <= up_to]
