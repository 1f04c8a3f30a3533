"""Decides what the trainer world does next, about a full micro-batch per rank at a time.

Invariants: an operation's work is cut into units that depend on that operation alone, and two units
of one model never share a micro-batch, so a model that runs alone sees the same batches on every
replay. A model that computes with weights of its own has its passes for itself, each with units of one
operation, so what is summed up with what depends on the operation alone. So has a sequence that all ranks
compute together. Nothing of a model runs before a control operation ahead of it. Models have the same tokens
computed while they have work, and one that asks for little, however often, waits for the pass that runs and
no other; a pass that only runs forward is not held up by a backward pass.
Pure: plain data in, a decision out.

Who is first is what weighted fair queuing answers (Demers, Keshav and Shenker, SIGCOMM 1989): whose next unit
would end first if all models with work were served at the same time, each at the same rate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile

from services.trainer.order.microbatch import Unit, deal

_AHEAD = 8
"""Units of one model that a pass has at most for each rank; of several training operations one."""


@dataclass
class QueuedOp:
    """One operation as the scheduler sees it.

    Attributes:
        seq_id: position in the model's order.
        units: work of a forward or forward_backward; None = a control operation, which runs by itself.
        next_unit: units before this one were handed out.
        forward_only: the work has no backward pass.
        suspect: it may bring the trainer down, see common/process/crashes.py, and runs with no other.
    """

    seq_id: int
    units: tuple[Unit, ...] | None
    next_unit: int = 0
    forward_only: bool = False
    suspect: bool = False


@dataclass(frozen=True)
class Limits:
    """Bounds of one pass.

    Attributes:
        micro_batches: that are computed at once, one by each rank. A pass has more, which follow on the same
            ranks, while all together are no more tokens than full ones would be; while more work is left, so
            many as keep all ranks busy.
        micro_batch_tokens: tokens up to which units of different models share a batch. A unit that is larger
            by itself has a batch of its own.
    """

    micro_batches: int
    micro_batch_tokens: int


@dataclass(frozen=True)
class Cursor:
    """What the last decisions were, for fairness.

    Attributes:
        clock: what a model has been served, in tokens of forward passes, that always had work. One without
            saves nothing up: when it is back it counts as served this much.
        served: the service of the models that had work, and of those that were served more.
        had_control: models that ran a control operation since the last pass.
    """

    clock: float = 0.0
    served: Mapping[str, float] = field(default_factory=dict)
    had_control: frozenset[str] = frozenset()

    def of(self, model: str) -> float:
        """What a model counts as served."""
        return self.served.get(model, self.clock)

    def after(self, waiting: Iterable[str], costs: Mapping[str, int]) -> Cursor:
        """The cursor after a pass that cost the models in it so much, and was chosen while these had work."""
        now = {model: self.of(model) + costs.get(model, 0) for model in waiting}
        gone = {name: served for name, served in self.served.items() if name not in now}
        # What those did not get who left behind the clock is the others'.
        work = sum(costs.values()) + sum(
            self.clock - served for served in gone.values() if served < self.clock
        )
        clock = _advanced(self.clock, work, len(now), gone.values())
        sharing = len(now)
        for model in sorted(costs, key=now.__getitem__):
            if now[model] >= clock or sharing == 1:
                break
            # Behind it all the same, it had of this pass what it could take: so is the rest of its share, and
            # it saves nothing up.
            work, sharing = work - (now[model] - self.clock), sharing - 1
            clock = _advanced(self.clock, work, sharing, gone.values())
        now = {model: max(served, clock) if model in costs else served for model, served in now.items()}
        ahead = {name: served for name, served in gone.items() if served > clock}
        return Cursor(clock, {**ahead, **now})


def _advanced(clock: float, work: float, waiting: int, gone: Iterable[float]) -> float:
    """The clock after so much work, shared alike among the models that have work and those that have none
    left but were served ahead of the clock, until it comes to where they were served to."""
    ahead = sorted(served for served in gone if served > clock)
    for number, served in enumerate(ahead):
        sharing = waiting + len(ahead) - number
        if (served - clock) * sharing > work:
            return clock + work / sharing
        work, clock = work - (served - clock) * sharing, served
    return clock + work / waiting


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
    if not fresh and not passes:
        fresh, cursor = control, replace(cursor, had_control=frozenset())
    if fresh:
        model = fresh[0]
        return NextControlOp(model, heads[model].seq_id), replace(
            cursor, had_control=cursor.had_control | {model}
        )
    if not passes:
        return None, Cursor()
    order = sorted(passes, key=lambda model: (cursor.of(model) + _cost(heads[model]), model))
    first = order[0]
    if _is_split(heads[first]):
        chosen = NextPass(((UnitRef(first, heads[first].seq_id, heads[first].next_unit),),))
    elif first in alone:
        chosen = _plan_alone(first, heads[first], limits)
    else:
        chosen = _plan_pass(queues, [model for model in order if model not in alone], limits)
    costs: dict[str, int] = {}
    for ref in (ref for batch in chosen.micro_batches for ref in batch):
        op = next(op for op in queues[ref.model_id] if op.seq_id == ref.seq_id)
        costs[ref.model_id] = costs.get(ref.model_id, 0) + _cost(op, ref.unit)
    return chosen, cursor.after(passes, costs)


def only_suspect(queues: Mapping[str, Sequence[QueuedOp]]) -> dict[str, Sequence[QueuedOp]] | None:
    """The queues cut down to the one operation that must run alone next; None when there is none."""
    for model, queue in queues.items():
        if queue and queue[0].suspect:
            return {model: queue[:1]}
    return None


def _head(queue: Iterable[QueuedOp]) -> QueuedOp | None:
    """First operation that still has something to hand out."""
    for op in queue:
        if op.units is None or op.next_unit < len(op.units):
            return op
    return None


def _is_split(op: QueuedOp) -> bool:
    """Whether all ranks compute the next unit together."""
    return op.units is not None and op.units[op.next_unit].split


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
    units = op.units
    assert units is not None
    fitting = islice(range(op.next_unit, len(units)), limits.micro_batches)
    of_one_rank = takewhile(lambda number: not units[number].split, fitting)
    return NextPass(tuple((UnitRef(model, op.seq_id, number),) for number in of_one_rank))


def _plan_pass(queues: Mapping[str, Iterable[QueuedOp]], order: Sequence[str], limits: Limits) -> NextPass:
    """Fills the pass with one unit per model in turn, until nothing more of the first one's kind fits."""
    head = _head(queues[order[0]])
    assert head is not None
    pending = {
        model: deque(_units_ahead(model, queues[model], limits.micro_batches, head.forward_only))
        for model in order
    }
    batches: list[_MicroBatch] = []
    last: dict[str, int] = {}
    progress = True
    while progress:
        progress = False
        for model, units in pending.items():
            if not units:
                continue
            ref, unit = units[0]
            place = _place(batches, model, unit, limits, last.get(model, -1))
            if place is not None:
                batches[place].add(ref, unit)
                last[model] = place
                units.popleft()
                progress = True
    if any(pending.values()):
        batches = batches[: _busiest(batches, limits.micro_batches)]
    return NextPass(tuple(tuple(batch.units) for batch in batches))


def _busiest(batches: Sequence[_MicroBatch], ranks: int) -> int:
    """How many of these keep the ranks busiest, which wait for each other at the end of a pass: at least one
    for each rank, and of equally good numbers the largest."""
    loads, total = [0] * ranks, 0
    best, most = len(batches), 0.0
    for count, batch in enumerate(batches, start=1):
        deal([batch.tokens], loads)
        total += batch.tokens
        if count >= ranks and total / max(loads) >= most and _are_next(batches[:count], batches[count:]):
            best, most = count, total / max(loads)
    return best


def _are_next(chosen: Iterable[_MicroBatch], left: Iterable[_MicroBatch]) -> bool:
    """Whether no model has a unit in `chosen` that comes after one in `left`: a later one may have found
    room in an earlier batch."""
    first: dict[str, tuple[int, int]] = {}
    for ref in (ref for batch in left for ref in batch.units):
        place = (ref.seq_id, ref.unit)
        first[ref.model_id] = min(place, first.get(ref.model_id, place))
    return all(
        ref.model_id not in first or (ref.seq_id, ref.unit) < first[ref.model_id]
        for batch in chosen
        for ref in batch.units
    )


def _place(batches: list[_MicroBatch], model: str, unit: Unit, limits: Limits, last: int) -> int | None:
    """Which batch a unit joins, perhaps a new one at the end of `batches`; None: it does not fit.

    A rank that has nothing yet comes first, then the batch that has least; among equals those after the
    model's last one, so that models which are cut alike do not meet in each other's way.
    """
    free = len(batches) < limits.micro_batches
    if not free:
        fitting = [number for number, batch in enumerate(batches) if batch.fits(model, unit, limits)]
        if fitting:
            return min(
                fitting, key=lambda number: (batches[number].tokens, (number - last - 1) % len(batches))
            )
        most = limits.micro_batches * limits.micro_batch_tokens
        if sum(batch.tokens for batch in batches) + unit.tokens > most:
            return None
    batches.append(_MicroBatch())
    return len(batches) - 1


def _units_ahead(
    model: str, queue: Iterable[QueuedOp], ranks: int, forward_only: bool
) -> Iterable[tuple[UnitRef, Unit]]:
    """A model's next units in order, with or without a backward pass as asked for, up to its next control
    operation, a suspect, a unit of the other kind or one that all ranks compute together.

    Each training operation has a gradient of its own until the pass is over, on every rank that computes a
    unit of it. So a rank has many units of one operation, but of several about one each.
    """
    count, first = 0, None
    for place, op in enumerate(queue):
        if op.units is None or (place and op.suspect):
            return
        for index in range(op.next_unit, len(op.units)):
            first = op.seq_id if first is None else first
            most = ranks * (_AHEAD if forward_only or op.seq_id == first else 1)
            if count >= most or op.forward_only != forward_only or op.units[index].split:
                return
            count += 1
            yield UnitRef(model, op.seq_id, index), op.units[index]
