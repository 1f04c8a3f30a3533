"""Decides what the trainer world does next, one micro-batch per rank at a time.

Invariants: an operation's work is cut into units that depend on that operation alone, and two units
of one model never share a micro-batch, so a model that runs alone sees the same batches on every
replay. A model that computes with weights of its own has its passes for itself, each with units of one
operation, so what is summed up with what depends on the operation alone. Nothing of a model runs before a
control operation ahead of it. The model that was served least comes first, by its tokens, so one that asks
for little waits for the pass that runs and no other; a pass that only runs forward is not held up by a
backward pass.
Pure: plain data in, a decision out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import islice

from services.trainer.order.microbatch import Unit


@dataclass
class QueuedOp:
    """One operation as the scheduler sees it.

    Attributes:
        seq_id: position in the model's order.
        units: work of a forward or forward_backward; None = a control operation, which runs by itself.
        next_unit: units before this one were handed out.
        forward_only: the work has no backward pass.
    """

    seq_id: int
    units: tuple[Unit, ...] | None
    next_unit: int = 0
    forward_only: bool = False


@dataclass(frozen=True)
class Limits:
    """Bounds of one pass.

    Attributes:
        micro_batches: micro-batches a pass may have.
        micro_batch_tokens: tokens up to which units of different models share a batch. A unit that is larger
            by itself has a batch of its own.
    """

    micro_batches: int
    micro_batch_tokens: int


@dataclass(frozen=True)
class Cursor:
    """What the last decisions were, for fairness.

    Attributes:
        clock: what the least served model had been served when it was last chosen. A model without work
            saves nothing up: when it is back it counts as served this much.
        served: the service of each model that had more, in tokens of forward passes.
        had_control: models that ran a control operation since the last pass.
    """

    clock: int = 0
    served: Mapping[str, int] = field(default_factory=dict)
    had_control: frozenset[str] = frozenset()

    def of(self, model: str) -> int:
        """What a model counts as served."""
        return self.served.get(model, self.clock)

    def after(self, first: str, costs: Mapping[str, int]) -> Cursor:
        """The cursor after a pass that was made for `first` and cost the models in it so much."""
        clock = self.of(first)
        served = {
            **self.served,
            **{model: max(self.of(model), clock) + cost for model, cost in costs.items()},
        }
        return Cursor(clock, {model: service for model, service in served.items() if service > clock})


@dataclass(frozen=True)
class UnitRef:
    """One unit of one model's operation."""

    model_id: str
    seq_id: int
    unit: int


@dataclass(frozen=True)
class NextControlOp:
    """Execute the operation at the head of a model's queue by itself."""

    model_id: str
    seq_id: int


@dataclass(frozen=True)
class NextPass:
    """Run these units, one list per micro-batch."""

    micro_batches: tuple[tuple[UnitRef, ...], ...]


Decision = NextControlOp | NextPass


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
    control = [model for model, head in heads.items() if head.units is None]
    passes = [model for model, head in heads.items() if head.units is not None]
    fresh = [model for model in control if model not in cursor.had_control]
    if not fresh and not passes and control:
        fresh, cursor = control, replace(cursor, had_control=frozenset())
    if fresh:
        model = fresh[0]
        return NextControlOp(model, heads[model].seq_id), replace(
            cursor, had_control=cursor.had_control | {model}
        )
    if not passes:
        return None, Cursor()
    order = sorted(passes, key=lambda model: (cursor.of(model), _cost(heads[model]), model))
    first = order[0]
    if first in alone:
        chosen = _plan_alone(first, heads[first], limits)
    else:
        chosen = _plan_pass(queues, [model for model in order if model not in alone], limits)
    costs: dict[str, int] = {}
    for ref in (ref for batch in chosen.micro_batches for ref in batch):
        op = next(op for op in queues[ref.model_id] if op.seq_id == ref.seq_id)
        costs[ref.model_id] = costs.get(ref.model_id, 0) + _cost(op, ref.unit)
    return chosen, cursor.after(first, costs)


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


def _cost(op: QueuedOp, unit: int | None = None) -> int:
    """Service of a unit, by default the next one, in tokens of forward passes. A backward pass costs two."""
    assert op.units is not None
    return op.units[op.next_unit if unit is None else unit].tokens * (1 if op.forward_only else 3)


@dataclass
class _MicroBatch:
    """A micro-batch that is being filled."""

    units: list[UnitRef] = field(default_factory=list)
    models: set[str] = field(default_factory=set)
    tokens: int = 0

    def fits(self, model: str, unit: Unit, limits: Limits) -> bool:
        return model not in self.models and self.tokens + unit.tokens <= limits.micro_batch_tokens

    def add(self, ref: UnitRef, unit: Unit) -> None:
        self.units.append(ref)
        self.models.add(ref.model_id)
        self.tokens += unit.tokens


def _plan_alone(model: str, op: QueuedOp, limits: Limits) -> NextPass:
    """A pass with the next units of one operation."""
    assert op.units is not None
    units = islice(range(op.next_unit, len(op.units)), limits.micro_batches)
    return NextPass(tuple((UnitRef(model, op.seq_id, unit),) for unit in units))


def _plan_pass(queues: Mapping[str, Iterable[QueuedOp]], order: Sequence[str], limits: Limits) -> NextPass:
    """Fills the pass with one unit per model in turn, until nothing more of the first one's kind fits."""
    head = _head(queues[order[0]])
    assert head is not None
    pending = {
        model: list(_units_ahead(model, queues[model], limits.micro_batches, head.forward_only))
        for model in order
    }
    batches: list[_MicroBatch] = []
    progress = True
    while progress:
        progress = False
        for model, units in pending.items():
            if not units:
                continue
            ref, unit = units[0]
            batch = next((batch for batch in batches if batch.fits(model, unit, limits)), None)
            if batch is None and len(batches) < limits.micro_batches:
                batch = _MicroBatch()
                batches.append(batch)
            if batch is not None:
                batch.add(ref, unit)
                units.pop(0)
                progress = True
    return NextPass(tuple(tuple(batch.units) for batch in batches))


def _units_ahead(
    model: str, queue: Iterable[QueuedOp], most: int, forward_only: bool
) -> Iterable[tuple[UnitRef, Unit]]:
    """A model's next units in order, with or without a backward pass as asked for, up to its next control
    operation or a unit of the other kind, at most as many as a pass has batches."""
    count = 0
    for op in queue:
        if op.units is None:
            return
        for index in range(op.next_unit, len(op.units)):
            if count == most or op.forward_only != forward_only:
                return
            count += 1
            yield UnitRef(model, op.seq_id, index), op.units[index]
