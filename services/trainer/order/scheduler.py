"""Decides what the trainer world does next.

Invariants: an operation's work is cut into units that depend on that operation alone, and two units
of one model never share a physical batch, so a model that runs alone sees the same batches on every
replay. A model that computes with weights of its own has its passes for itself, each with units of one
operation, so what is summed up with what depends on the operation alone. Nothing of a model runs before a
barrier ahead of it. No model waits for more than one pass and one barrier of every other model. Pure: plain
data in, a decision out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import islice


@dataclass(frozen=True)
class Unit:
    """Datums of one operation that stay together in one physical batch.

    Attributes:
        datums: their indices in the operation.
        longest: tokens of the longest.
    """

    datums: tuple[int, ...]
    longest: int


@dataclass
class QueuedOp:
    """One operation as the scheduler sees it.

    Attributes:
        seq_id: position in the model's order.
        units: work of a forward or forward_backward; None = a barrier, which runs by itself.
        next_unit: units before this one were handed out.
    """

    seq_id: int
    units: tuple[Unit, ...] | None
    next_unit: int = 0


@dataclass(frozen=True)
class Limits:
    """Bounds of one pass.

    Attributes:
        micro_batches: physical batches a pass may have.
        micro_batch_tokens: padded tokens (rows x longest) up to which units of different models share a
            batch. A unit that is larger by itself has a batch of its own.
    """

    micro_batches: int
    micro_batch_tokens: int


@dataclass(frozen=True)
class Cursor:
    """What the last decisions were, for fairness.

    Attributes:
        last_model: the next pass starts with the model after this one.
        had_barrier: models that ran a barrier since the last pass.
    """

    last_model: str = ""
    had_barrier: frozenset[str] = frozenset()


@dataclass(frozen=True)
class UnitRef:
    """One unit of one model's operation."""

    model_id: str
    seq_id: int
    unit: int


@dataclass(frozen=True)
class RunBarrier:
    """Execute the operation at the head of a model's queue by itself."""

    model_id: str
    seq_id: int


@dataclass(frozen=True)
class RunPass:
    """Run these units, one list per physical batch."""

    micro_batches: tuple[tuple[UnitRef, ...], ...]


Decision = RunBarrier | RunPass


def plan_next(
    queues: Mapping[str, Iterable[QueuedOp]],
    limits: Limits,
    cursor: Cursor,
    alone: Set[str] = frozenset(),
) -> tuple[Decision | None, Cursor]:
    """The next decision and the cursor to pass in next time. None: there is nothing to do.

    Args:
        queues: per model its operations in order; leave out a model that must wait. Not modified.
        alone: models that share no pass.
    """
    heads = {model: head for model, queue in queues.items() if (head := _head(queue)) is not None}
    barriers = [model for model, head in heads.items() if head.units is None]
    passes = [model for model, head in heads.items() if head.units is not None]
    fresh = [model for model in barriers if model not in cursor.had_barrier]
    if not fresh and not passes and barriers:
        fresh, cursor = barriers, Cursor(cursor.last_model)
    if fresh:
        model = fresh[0]
        served = Cursor(cursor.last_model, cursor.had_barrier | {model})
        return RunBarrier(model, heads[model].seq_id), served
    if passes:
        order = _rotated(passes, cursor.last_model)
        if order[0] in alone:
            return _plan_alone(order[0], heads[order[0]], limits)
        return _plan_pass(queues, order, limits, alone)
    return None, cursor


def only_suspect(
    queues: Mapping[str, Sequence[QueuedOp]], is_suspect: Callable[[str, int], bool]
) -> dict[str, Sequence[QueuedOp]] | None:
    """The queues cut down to the one operation that must run alone next; None when there is none.

    Args:
        is_suspect: whether (model, seq_id) may bring the trainer down, see common/process/crashes.py.
    """
    for model, queue in queues.items():
        if queue and is_suspect(model, queue[0].seq_id):
            return {model: queue[:1]}
    return None


def _head(queue: Iterable[QueuedOp]) -> QueuedOp | None:
    """First operation that still has something to hand out."""
    for op in queue:
        if op.units is None or op.next_unit < len(op.units):
            return op
    return None


def _rotated(models: list[str], last: str) -> list[str]:
    """The models in a fixed order, starting after `last`."""
    ordered = sorted(models)
    return [model for model in ordered if model > last] + [model for model in ordered if model <= last]


@dataclass
class _Batch:
    """A physical batch that is being filled."""

    units: list[UnitRef] = field(default_factory=list)
    models: set[str] = field(default_factory=set)
    rows: int = 0
    longest: int = 0

    def fits(self, model: str, unit: Unit, limits: Limits) -> bool:
        rows, longest = self.rows + len(unit.datums), max(self.longest, unit.longest)
        return model not in self.models and rows * longest <= limits.micro_batch_tokens

    def add(self, ref: UnitRef, unit: Unit) -> None:
        self.units.append(ref)
        self.models.add(ref.model_id)
        self.rows += len(unit.datums)
        self.longest = max(self.longest, unit.longest)


def _plan_alone(model: str, op: QueuedOp, limits: Limits) -> tuple[RunPass, Cursor]:
    """A pass with the next units of one operation."""
    assert op.units is not None
    units = islice(range(op.next_unit, len(op.units)), limits.micro_batches)
    return RunPass(tuple((UnitRef(model, op.seq_id, unit),) for unit in units)), Cursor(model)


def _plan_pass(
    queues: Mapping[str, Iterable[QueuedOp]], order: list[str], limits: Limits, alone: Set[str]
) -> tuple[RunPass, Cursor]:
    """Fills the pass with one unit per sharing model in turn, until nothing more fits."""
    pending = {
        model: list(_units_to_barrier(model, queues[model], limits.micro_batches))
        for model in order
        if model not in alone
    }
    batches: list[_Batch] = []
    served: set[str] = set()
    progress = True
    while progress:
        progress = False
        for model, units in pending.items():
            if not units:
                continue
            ref, unit = units[0]
            batch = next((batch for batch in batches if batch.fits(model, unit, limits)), None)
            if batch is None and len(batches) < limits.micro_batches:
                batch = _Batch()
                batches.append(batch)
            if batch is not None:
                batch.add(ref, unit)
                units.pop(0)
                served.add(model)
                progress = True
    # The first model that found no room starts the next pass.
    before_skipped = next((i - 1 for i, model in enumerate(order) if model not in served), 0)
    return RunPass(tuple(tuple(batch.units) for batch in batches)), Cursor(order[before_skipped])


def _units_to_barrier(model: str, queue: Iterable[QueuedOp], most: int) -> Iterable[tuple[UnitRef, Unit]]:
    """A model's next units in order, up to its next barrier, at most as many as a pass has batches."""
    count = 0
    for op in queue:
        if op.units is None:
            return
        for index in range(op.next_unit, len(op.units)):
            if count == most:
                return
            count += 1
            yield UnitRef(model, op.seq_id, index), op.units[index]
