"""What a sample used of the cluster, by what it came to, and what its session's timeline tells of it."""

from __future__ import annotations

from services.common.contract import ids
from services.common.state.journal_records import CACHED, NOTHING_USED, PREFILLED, SAMPLED, Use
from services.gateway.dispatch.used import TOKEN_BYTES, event
from services.gateway.records.sampling_session import SamplingSessionRecord
from services.gateway.timelines.event import Event
from tinsmith.internal.v1 import operation_pb2, sampler_pb2
from tinsmith.v1.results_pb2 import OperationResult


def used_by(
    request: sampler_pb2.SampleRequest, session: SamplingSessionRecord, result: OperationResult
) -> Use:
    """Tokens of its prompt, from a cache or not, and those generated; of one that failed nothing."""
    if result.WhichOneof("kind") != "sample":
        return NOTHING_USED
    prompt = len(request.prompt.data) // TOKEN_BYTES
    cached = min(prompt, result.sample.prompt_cache_hit_tokens)
    sampled = sum(len(sequence.tokens.data) // TOKEN_BYTES for sequence in result.sample.sequences)
    amounts = {PREFILLED: prompt - cached, CACHED: cached, SAMPLED: sampled}
    return Use(session.owner, session.session_id, session.model_id or "", session.base_model, amounts)


def event_of(request_id: str, origin: operation_pb2.Origin, result: OperationResult, ended: float) -> Event:
    """A sample that has its result, since `ended`."""
    return event(*ids.parse_request_id(request_id), "sample", origin, result, ended)
