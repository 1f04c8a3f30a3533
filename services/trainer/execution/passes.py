"""A pass as the engine is given it, and what its operations came to.

Invariant: a row is known by its operation's number in the pass and its index among the operation's data; a
result is built of every row once, in the order of the data.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from services.common.contract.errors import Internal
from services.common.contract.errors import to_pb as error_to_pb
from services.common.telemetry import subject
from services.trainer import convert
from services.trainer.compute.data import MicroBatch, Pass, PassOp, Row
from services.trainer.convert import Forward
from services.trainer.execution.resident_models import Model, Operation, OperationResult
from services.trainer.order.microbatch import Unit
from services.trainer.order.scheduler import NextPass, UnitRef

log = logging.getLogger(__name__)


def plan(decision: NextPass, models: Mapping[str, Model]) -> tuple[Pass, list[Operation]]:
    """The engine's plan of a pass, and the operations its numbers refer to."""
    operations: list[Operation] = []
    numbers: dict[tuple[str, int], int] = {}
    for ref in _refs(decision):
        if (ref.model_id, ref.seq_id) not in numbers:
            numbers[ref.model_id, ref.seq_id] = len(operations)
            operations.append(models[ref.model_id].find(ref))
    batches = [
        MicroBatch(
            [row for ref in batch for row in _rows(ref, numbers, operations)],
            any(_unit(ref, models).split for ref in batch),
        )
        for batch in decision.micro_batches
    ]
    return Pass([_pass_op(operation) for operation in operations], batches), operations


def hand_out(decision: NextPass, models: Mapping[str, Model]) -> list[Operation]:
    """Takes the units of a pass from their operations; returns those that begin with it."""
    begun: list[Operation] = []
    for ref in _refs(decision):
        operation = models[ref.model_id].find(ref)
        if operation.next_unit == 0:
            begun.append(operation)
        # A later unit of an operation may be in an earlier batch.
        operation.next_unit = max(operation.next_unit, ref.unit + 1)
    return begun


def computed_tokens(decision: NextPass, models: Mapping[str, Model]) -> list[int]:
    """Tokens that each micro-batch computes."""
    return [sum(_unit(ref, models).tokens for ref in batch) for batch in decision.micro_batches]


def is_shared_training(decision: NextPass, models: Mapping[str, Model]) -> bool:
    """Whether a pass has a backward one, as all of its units or none have, and models can share it: adapters,
    on one rank each."""
    return not any(
        models[ref.model_id].is_full
        or models[ref.model_id].find(ref).forward_only
        or _unit(ref, models).split
        for ref in _refs(decision)
    )


def _refs(decision: NextPass) -> list[UnitRef]:
    return [ref for batch in decision.micro_batches for ref in batch]


def _unit(ref: UnitRef, models: Mapping[str, Model]) -> Unit:
    units = models[ref.model_id].find(ref).units
    assert units is not None
    return units[ref.unit]


def _rows(ref: UnitRef, numbers: dict[tuple[str, int], int], operations: list[Operation]) -> list[Row]:
    number = numbers[ref.model_id, ref.seq_id]
    operation = operations[number]
    assert isinstance(operation.work, Forward) and operation.units is not None
    data = operation.work.data
    datums = operation.units[ref.unit].datums
    return [
        Row(number, index, data[index].tokens, data[index].loss_inputs, data[index].routed)
        for index in datums
    ]


def _pass_op(operation: Operation) -> PassOp:
    work = operation.work
    assert isinstance(work, Forward)
    return PassOp(operation.model_id, operation.seq_id, work.loss_fn, work.loss_config, work.forward_only)


def forward_result(operation: Operation) -> OperationResult:
    """What a forward came to whose rows are all there, or one that failed."""
    with subject.about(operation.subject):
        return _built(operation)


def _built(operation: Operation) -> OperationResult:
    if operation.failed is not None:
        return OperationResult(error=error_to_pb(operation.failed))
    assert isinstance(operation.work, Forward)
    try:
        return convert.forwarded(operation.work, [operation.rows[i] for i in range(len(operation.rows))])
    except Exception as error:
        log.exception("the result of %s:%d could not be built", operation.model_id, operation.seq_id)
        # It took effect: a replay must repeat it.
        reason = f"the operation was executed, but its result could not be built: {type(error).__name__}"
        return OperationResult(error=error_to_pb(Internal(f"{reason}: {error}", "result_lost")))
