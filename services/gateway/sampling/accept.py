"""Sampling: sessions that answer from one immutable snapshot, and their requests.

Invariant: what a sampling session answers from is written once, when the session is made, and
never changes; an inflight session follows its model, but only when the dispatcher sends a request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from services.common.contract import ids
from services.common.contract.errors import Conflict, Gone, InvalidRequest, NotFound, Unavailable
from services.common.process import failpoints
from services.common.process.pools import COMPUTE
from services.common.state.journal_records import Accepted
from services.common.telemetry import subject
from services.gateway.access.limits import THREAD_ABOVE_BYTES, Limits
from services.gateway.checkpoints.checkpoints import Checkpoints
from services.gateway.cluster.base_models import BaseModel, BaseModels
from services.gateway.cluster.redis_restart import RedoLog
from services.gateway.dispatch.plan import backoff
from services.gateway.records.sample_journal import Resolution, SampleJournal
from services.gateway.records.sampling_session import SamplingSessionRecord, SamplingSessionStore
from services.gateway.sampling import validate
from services.gateway.sampling.admission import Admission
from services.gateway.sessions.sessions import Sessions
from tinsmith.internal.v1 import sampler_pb2
from tinsmith.v1 import sampling_pb2

_KEPT_S = 0.02
"""What the first look at a sample that was just ended waits for it."""


@dataclass(frozen=True)
class Weights:
    """What a sampling session answers from; see SamplingSessionRecord."""

    base_model: str
    model_id: str
    version: int
    model_path: str
    full: bool


class Sampling:
    """Opens sampling sessions and accepts samples.

    `submit(accepted, request)` hands an accepted sample to this gateway's sample dispatcher.
    """

    def __init__(
        self,
        journal: SampleJournal,
        sessions: Sessions,
        checkpoints: Checkpoints,
        store: SamplingSessionStore,
        base_models: BaseModels,
        submit: Callable[[Accepted, sampler_pb2.SampleRequest], None],
        gateway_id: str,
        admission: Admission,
        limits: Limits,
        redo_log: RedoLog,
    ) -> None:
        self._redo_log = redo_log
        self._journal = journal
        self._sessions = sessions
        self._checkpoints = checkpoints
        self._store = store
        self._base_models = base_models
        self._submit = submit
        self._gateway_id = gateway_id
        self._admission = admission
        self._limits = limits

    async def open(
        self, owner: str, session_id: str, seq_id: int, base_model: str | None, model_path: str | None
    ) -> str:
        """Opens a sampling session on a base model or on a named snapshot; its id.

        Raises:
            InvalidRequest: neither is given, they contradict, or the base model is not sampled here.
            NotFound, Gone: session or checkpoint is not there or not the caller's.
            Conflict: seq_id was used for another sampling session.
        """
        weights = await self.resolve(owner, base_model, model_path)
        return await self.open_on(owner, session_id, seq_id, weights)

    async def resolve(self, owner: str, base_model: str | None, model_path: str | None) -> Weights:
        """The weights that a base model, a named snapshot or both stand for now. Raises as `open`."""
        model_id, version, full = "", 0, False
        if model_path:
            model_id, checkpoint_id = ids.parse_tinker_path(model_path)
            if not checkpoint_id.startswith("sampler_weights/"):
                raise InvalidRequest(
                    f"{model_path} cannot be sampled; save_weights_for_sampler writes what can, at "
                    "tinker://<training_run_id>/sampler_weights/<name>",
                    field="model_path",
                )
            checkpoint = await self._checkpoints.readable(owner, model_id, checkpoint_id)
            if base_model and (await self._base_models.get(base_model)).name != checkpoint.base_model:
                raise InvalidRequest(f"{model_path} adapts {checkpoint.base_model}, not {base_model[:200]}")
            base_model, version = checkpoint.base_model, checkpoint.version
            full = checkpoint.lora_rank == 0
        if not base_model:
            raise InvalidRequest("pass base_model or model_path", field="base_model")
        base = await self._base_models.sampleable(base_model)
        return Weights(base.name, model_id, version, model_path or "", full)

    async def open_on(self, owner: str, session_id: str, seq_id: int, weights: Weights) -> str:
        """Opens a sampling session on weights that `resolve` found; its id. Raises as `open`."""
        await self._sessions.open_for_more(owner, session_id)
        record = SamplingSessionRecord(
            sampling_session_id=ids.sampling_session_id(session_id, seq_id),
            session_id=session_id,
            owner=owner,
            base_model=weights.base_model,
            model_id=weights.model_id,
            version=weights.version,
            model_path=weights.model_path,
            full=weights.full,
        )
        if await self._store.get(record.sampling_session_id) is None:
            self._limits.owners.check_samplers(await self._store.count(session_id))
            await self._sessions.check_room(owner, record)
        stored = await self._redo_log.perform(lambda: self._store.create_if_absent(record))
        if stored != record:
            raise Conflict(
                f"sampling session {record.sampling_session_id} exists on other weights; use the next seq id"
            )
        return record.sampling_session_id

    async def get(self, owner: str, sampling_session_id: str) -> SamplingSessionRecord:
        """A sampling session of the caller.

        Raises:
            NotFound: no such session of the caller's, or the save that makes it has not completed.
        """
        known = ids.is_sampling_session_id(sampling_session_id)
        record = await self._store.known(sampling_session_id) if known else None
        if record is None or record.owner != owner:
            await self._redo_log.refuse_while_restoring()
            raise NotFound(f"sampling session {sampling_session_id[:100]!r} does not exist; create one first")
        return record

    async def sample(
        self,
        owner: str,
        request: sampling_pb2.SampleRequest,
        constraint: sampler_pb2.Constraint | None = None,
    ) -> str:
        """Accepts a sample; the request id.

        Args:
            constraint: what may be generated at all; None = anything.

        Raises:
            InvalidRequest: the sampler could not run it. Nothing is used up.
            NotFound, Gone: the sampling session cannot be used.
            Conflict: seq_id was used for another sample of the session.
            Overloaded: too many samples wait; send the same again later.
            Starting: the base model's first sampler still loads; send the same again later.
        """
        record = await self.get(owner, request.sampling_session_id)
        await self._sessions.open(owner, record.session_id)
        base = await self._base_models.in_sampling(record.base_model)
        if request.ByteSize() > THREAD_ABOVE_BYTES:
            made = await COMPUTE.run(_made, record, request, constraint, base, self._limits)
        else:
            made = _made(record, request, constraint, base, self._limits)
        sample, payload, answer = made
        request_id = sample.request_id
        subject.note(owner, record.model_id, request_id)
        sample.origin.traceparent, sample.origin.owner = subject.traceparent(), owner
        sample.origin.accepted_at = time.time()
        counted = self._admission.admit(request_id, owner, sample.num_samples, len(payload))
        try:
            accept = partial(
                self._journal.accept,
                record.sampling_session_id,
                request.seq_id,
                payload,
                self._gateway_id,
                owner,
                answer,
                _told_beside(sample).SerializeToString(),
            )
            # Who waits for completions of its samples asks for none again.
            accepted = await self._redo_log.perform(accept, len(payload))
        except BaseException:
            if counted:
                self._admission.release(request_id)
            raise
        await failpoints.reach("gateway.after_accept_sample")
        self._submit(accepted, sample)
        return request_id

    def check_room(self, owner: str) -> None:
        """Refuses early, before a sample is read, what `sample` would refuse whatever it is.

        Raises:
            Overloaded: too many samples of this key wait; send the same again later.
        """
        self._admission.check(owner)

    async def cancel(self, owner: str, request_id: str) -> None:
        """Gives a sample up: its future fails, and the engine stops working on it, wherever it runs.

        One that is resolved stays as it is. Repeating changes nothing.

        Raises:
            InvalidRequest: not the request of a sample; what was accepted for a model takes effect.
            Gone: no such request, or its result expired.
            NotFound: the sampling session is not there or not the caller's.
        """
        await self._check_sample(owner, request_id)
        outcome = await self._journal.cancel(request_id, "the sample was cancelled by its client")
        if outcome is Resolution.UNKNOWN:
            raise _gone(request_id)

    async def keep(self, owner: str, request_id: str, seconds: float) -> None:
        """Ends a sample with what it has come to, wherever it runs; returns when its result is there.

        Raises:
            Unavailable: it has not ended after so many seconds, as when the gateway that has it is gone.
            InvalidRequest, Gone, NotFound: as `cancel`.
        """
        await self._check_sample(owner, request_id)
        clock = asyncio.get_running_loop().time
        deadline, tries = clock() + seconds, 0
        while (state := await self._journal.state(request_id)) == "pending":
            if clock() >= deadline:
                raise Unavailable("the sample has not ended yet; send this again")
            # A word is heard by who listens at that moment, and the sample may be on its way to a replica.
            await self._journal.keep(request_id)
            tries += 1
            await asyncio.sleep(min(backoff(tries, _KEPT_S, 1.0), max(0.0, deadline - clock())))
        if state == "unknown":
            raise _gone(request_id)

    async def _check_sample(self, owner: str, request_id: str) -> None:
        object_id, _ = ids.parse_request_id(request_id)
        if not ids.is_sampling_session_id(object_id):
            raise InvalidRequest(
                f"{request_id} is an operation of a model and takes effect; only samples can be cancelled",
                field="request_id",
            )
        await self.get(owner, object_id)

    async def cancel_samples_of_session(self, session_id: str, reason: str) -> int:
        """Gives up every pending sample of a session's sampling clients, on all gateways; how many.

        For sessions that were finished or abandoned. Samples accepted meanwhile are left; call again.
        """
        cancelled = 0
        for request_id in await self._journal.pending(await self._store.of_session(session_id)):
            outcome = await self._journal.cancel(request_id, reason)
            cancelled += outcome is Resolution.NOW
        return cancelled


def _made(
    record: SamplingSessionRecord,
    request: sampling_pb2.SampleRequest,
    constraint: sampler_pb2.Constraint | None,
    base: BaseModel,
    limits: Limits,
) -> tuple[sampler_pb2.SampleRequest, bytes, int]:
    """What a sampler is sent, the same serialized but for what is told beside, and bytes of the largest
    answer. Proportional to the request.

    Raises:
        InvalidRequest: the sampler could not run it.
    """
    answer = validate.check_sample(request, base, limits)
    if request.routed_experts and record.model_id:
        validate.check_told(base, full=record.full)
    constraint = constraint or _constraint(request.params)
    update = validate.check_on_update(request, record.inflight, constraint is not None)
    sample = sampler_pb2.SampleRequest(
        request_id=ids.request_id(record.sampling_session_id, request.seq_id),
        prompt=request.prompt,
        num_samples=request.num_samples,
        params=request.params,
        prompt_logprobs=request.prompt_logprobs,
        topk_prompt_logprobs=request.topk_prompt_logprobs,
        topk_sample_logprobs=request.topk_sample_logprobs,
        prompt_alt_tokens_k=request.prompt_alt_tokens_k,
        cache_namespace=_cache_namespace(record),
        constraint=constraint,
        moves=update.moves,
        keeps_kv=update.keeps_kv,
        sampled_logprobs=validate.check_logprobs_of(request),
        priority=request.priority,
        routed_experts=request.routed_experts,
    )
    if request.HasField("target_prompt_logprobs"):
        sample.target_prompt_logprobs.CopyFrom(request.target_prompt_logprobs)
    if request.HasField("prompt_logprobs_last_n"):
        sample.prompt_logprobs_last_n = request.prompt_logprobs_last_n
    # It is told once, beside the parameters.
    sample.params.ClearField("constraint")
    sample.snapshot.model_id, sample.snapshot.version = record.model_id, record.version
    payload = sample.SerializeToString(deterministic=True)
    # A replica may take longer sequences than others, or than trainers do.
    left = base.context_length - request.prompt.shape[0]
    sample.params.max_tokens = min(request.params.max_tokens or left, left)
    return sample, payload, answer


def _told_beside(sample: sampler_pb2.SampleRequest) -> sampler_pb2.SampleRequest:
    """What may differ when a sample is repeated. Parts of a serialized message may be put one after the
    other."""
    return sampler_pb2.SampleRequest(
        origin=sample.origin, params=sampling_pb2.SamplingParams(max_tokens=sample.params.max_tokens)
    )


def _gone(request_id: str) -> Gone:
    return Gone(f"request {request_id} does not exist, or its result expired")


def _constraint(params: sampling_pb2.SamplingParams) -> sampler_pb2.Constraint | None:
    asked = params.constraint
    match asked.WhichOneof("kind"):
        case "json_schema":
            return sampler_pb2.Constraint(json_schema=asked.json_schema)
        case "regex":
            return sampler_pb2.Constraint(regex=asked.regex)
        case _:
            return None


def _cache_namespace(record: SamplingSessionRecord) -> str:
    """Who shares cached prefixes: one owner's samples of a snapshot, and those of an inflight client alone.

    Otherwise the number of cached tokens in an answer would tell whether another owner has sent a prompt.
    """
    return record.sampling_session_id if record.inflight else f"owner/{record.owner}"


def sequence_ids(request_id: str, num_samples: int) -> list[str]:
    """Ids of the sequences of a sample, in their order; unique in the session."""
    return [f"{request_id}:{index}" for index in range(num_samples)]
