"""What an operation used of the cluster, by what it came to, and what its session's timeline tells of it."""

from __future__ import annotations

from services.common.contract import ids
from services.common.state.journal_records import NOTHING_USED, SAVED, SAVED_BYTES, TRAINED, Use
from services.common.telemetry.subject import Subject
from services.gateway.timelines.event import Event
from tinsmith.internal.v1 import operation_pb2
from tinsmith.v1 import results_pb2

TOKEN_BYTES = 4
"""Of a token's id, int32."""


def used_by(operation: operation_pb2.Operation, result: results_pb2.OperationResult) -> Use:
    """Tokens of its data, or the checkpoint that it saved under a name; of one that failed nothing."""
    kind, model_id = result.WhichOneof("kind"), operation.model_id
    amounts: dict[str, int] = {}
    if kind == "forward_backward":
        amounts = {
            TRAINED: sum(len(datum.tokens.data) // TOKEN_BYTES for datum in operation.forward_backward.data)
        }
    elif kind == "save_state":
        amounts = {SAVED: 1, SAVED_BYTES: result.save_state.size_bytes}
    elif kind == "save_external":
        amounts = {SAVED: 1, SAVED_BYTES: result.save_external.size_bytes}
    elif kind == "save_for_sampler" and operation.save_for_sampler.checkpoint_id:
        amounts = {SAVED: 1, SAVED_BYTES: result.save_for_sampler.size_bytes}
    if not amounts:
        return NOTHING_USED
    return Use(operation.origin.owner, ids.session_of(model_id), model_id, "", amounts)


def event_of(operation: operation_pb2.Operation, result: results_pb2.OperationResult, ended: float) -> Event:
    """An operation that has its result, since `ended`."""
    kind = str(operation.WhichOneof("kind"))
    if kind == "forward_backward" and operation.forward_backward.forward_only:
        kind = "forward"
    return event(operation.model_id, operation.seq_id, kind, operation.origin, result, ended)


def event(
    object_id: str,
    seq_id: int,
    kind: str,
    origin: operation_pb2.Origin,
    result: results_pb2.OperationResult,
    ended: float,
) -> Event:
    """What became of a request that was sent to a model or sampling session."""
    return Event(
        object_id=object_id,
        seq_id=seq_id,
        kind=kind,
        accepted=origin.accepted_at or ended,
        began=origin.handed_at,
        ended=ended,
        outcome=result.error.code if result.HasField("error") else "done",
        trace_id=Subject.of(origin.traceparent).trace_id if origin.traceparent else "",
    )
