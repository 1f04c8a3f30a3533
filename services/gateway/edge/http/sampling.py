"""HTTP: sampling sessions and samples."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from starlette.responses import Response

from services.common.contract.errors import InvalidRequest
from services.common.contract.sample_schema import MAX_CELLS
from services.common.process.pools import COMPUTE
from services.gateway.access.limits import THREAD_ABOVE_BYTES, Limits
from services.gateway.edge.http.body import received
from services.gateway.edge.http.codec import messages
from services.gateway.edge.http.codec.long_lists import LongLists, widened
from services.gateway.edge.http.routes import Call, reply
from services.gateway.sampling.accept import sequence_ids
from tinsmith.v1 import sampling_pb2, types_pb2

_NO_STABILITY = (
    "record_stability_info is not served: only the loss stable_reinforce reads it, whose formula is not "
    "public; use importance_sampling, ppo, cispo, dro or gspo (in tinker-cookbook: "
    "loss_fn=importance_sampling), or have the operator let one of them run in its place "
    "(--stable-reinforce-as)"
)


async def create_sampling_session(call: Call) -> Response:
    body = await call.json(messages.CreateSamplingSession)
    session_id = await call.app.sampling.open(
        call.owner, body.session_id, body.sampling_session_seq_id, body.base_model, body.model_path
    )
    return reply({"type": "create_sampling_session", "sampling_session_id": session_id})


async def get_sampler(call: Call) -> Response:
    record = await call.app.sampling.get(call.owner, call.request.path_params["sampling_session_id"])
    answer = {"sampler_id": record.sampling_session_id, "base_model": record.base_model}
    if record.model_path:
        answer["model_path"] = record.model_path
    return reply(answer)


async def asample(call: Call) -> Response:
    call.app.sampling.check_room(call.owner)
    limits = call.app.limits
    with call.budget.account(call.owner) as account:
        data = await received(call.request, account, limits.sample_body_bytes)
        if len(data) > THREAD_ABOVE_BYTES:
            # Before it is known what becomes of it: of "1," a number of 4 bytes.
            account.hold(3 * len(data))
            request = await COMPUTE.run(sample_request, data, limits)
            account.hold(len(data) + request.ByteSize())
        else:
            request = sample_request(data, limits)
        request_id = await call.app.sampling.sample(call.owner, request)
    return reply(
        {"request_id": request_id, "sample_sequence_ids": sequence_ids(request_id, request.num_samples)}
    )


def sample_request(data: bytes, limits: Limits) -> sampling_pb2.SampleRequest:
    """The request of an asample body. Proportional to its size, in steps that are not.

    Raises:
        InvalidRequest: the body is malformed, or asks for something that is not served.
    """
    lists = LongLists(data)
    body = messages.parse(messages.Sample, lists.rest)
    for name in ("base_model", "model_path"):
        if getattr(body, name) is not None:
            raise InvalidRequest(f"{name} is not served: create a sampling session with it")
    # Refused and not ignored: whoever sets it is about to train with a loss that is refused, and should know
    # before the rollouts are paid for. What runs in that loss's place needs nothing recorded.
    if body.record_stability_info and not limits.stable_reinforce_as:
        raise InvalidRequest(_NO_STABILITY)
    if body.sampling_session_id is None or body.seq_id is None:
        raise InvalidRequest("sampling_session_id and seq_id are missing; open a sampling session first")
    tokens = _tokens(body.prompt, lists, limits)
    targets = body.target_prompt_logprobs
    request = sampling_pb2.SampleRequest(
        sampling_session_id=body.sampling_session_id,
        seq_id=body.seq_id,
        prompt=types_pb2.Tensor(dtype=types_pb2.DATA_TYPE_INT32, shape=[len(tokens)], data=tokens.tobytes()),
        num_samples=body.num_samples,
        params=_params(body.sampling_params, lists, limits),
        prompt_logprobs=bool(body.prompt_logprobs),
        topk_prompt_logprobs=body.topk_prompt_logprobs,
        topk_sample_logprobs=body.topk_sample_logprobs,
        target_prompt_logprobs=None if targets is None else _matrix(targets, lists),
        prompt_alt_tokens_k=body.prompt_alt_tokens_k,
        prompt_logprobs_last_n=body.prompt_logprobs_last_n,
    )
    lists.check_all_taken()
    return request


def _tokens(prompt: messages.ModelInput, lists: LongLists, limits: Limits) -> array[int]:
    """All text chunks of a prompt as 32-bit ids."""
    tokens = array("i")
    for chunk in prompt.chunks:
        if not isinstance(chunk, messages.EncodedTextChunk):
            raise InvalidRequest("only text tokens are served; remove images and audio from the prompt")
        more = lists.take(chunk.tokens)
        if more.typecode != tokens.typecode:
            raise InvalidRequest("a prompt token is outside of any vocabulary", "token_out_of_range")
        if len(tokens) + len(more) > limits.prompt_tokens:
            raise InvalidRequest(f"the prompt has more than {limits.prompt_tokens} tokens; shorten it")
        if tokens:
            tokens.extend(more)
        else:
            tokens = more
    return tokens


def _matrix(given: messages.TensorData, lists: LongLists) -> types_pb2.Matrix:
    matrix = types_pb2.Matrix(values=_int64(lists.take(given.data)), shape=given.shape)
    if given.sparse_crow_indices is not None:
        matrix.crow_indices.CopyFrom(_int64(lists.take(given.sparse_crow_indices)))
    if given.sparse_col_indices is not None:
        matrix.col_indices.CopyFrom(_int64(lists.take(given.sparse_col_indices)))
    return matrix


def _int64(values: array[int]) -> types_pb2.Tensor:
    if len(values) > MAX_CELLS + 1:
        raise InvalidRequest(f"target_prompt_logprobs has {len(values)} cells; send at most {MAX_CELLS}")
    data = widened(values).tobytes()
    return types_pb2.Tensor(dtype=types_pb2.DATA_TYPE_INT64, shape=[len(values)], data=data)


def _params(given: messages.SamplingParams, lists: LongLists, limits: Limits) -> sampling_pb2.SamplingParams:
    if given.seed is not None and not 0 <= given.seed < 2**64:
        raise InvalidRequest(f"seed must be 0 to {2**64 - 1}")
    return sampling_pb2.SamplingParams(
        max_tokens=given.max_tokens,
        seed=given.seed,
        stop=_stop(given.stop, lists, limits),
        temperature=given.temperature,
        top_k=given.top_k,
        top_p=given.top_p,
    )


def _stop(stop: str | list[str | int] | None, lists: LongLists, limits: Limits) -> sampling_pb2.StopCondition:
    """None stops at the model's end-of-sequence tokens, an empty list never."""
    condition = sampling_pb2.StopCondition()
    values: Sequence[str | int] | None = [stop] if isinstance(stop, str) else stop
    if isinstance(stop, str) and lists.is_mark(stop):
        values = lists.take(stop)
    most = max(limits.stop_tokens, limits.stop_strings)
    if values is not None and len(values) > most:
        raise InvalidRequest(f"stop has {len(values)} entries; send at most {most}")
    if values is None:
        condition.model_eos.SetInParent()
    elif not values:
        condition.never.SetInParent()
    elif all(isinstance(value, str) for value in values):
        condition.strings.values.extend(str(value) for value in values)
    elif all(isinstance(value, int) for value in values):
        ids = [value for value in values if isinstance(value, int)]
        if not all(-(2**31) <= value < 2**31 for value in ids):
            raise InvalidRequest("a stop token is outside of any vocabulary", "token_out_of_range")
        condition.tokens.ids.extend(ids)
    else:
        raise InvalidRequest("stop must be strings or token ids, not both")
    return condition
