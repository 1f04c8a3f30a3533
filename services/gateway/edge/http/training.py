"""HTTP: models and training requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from starlette.responses import Response

from services.common.contract.errors import (
    InvalidRequest,
    PermissionDenied,
    TinsmithError,
    Unauthenticated,
)
from services.common.process.pools import COMPUTE
from services.gateway.access.body_budget import JSON_TIMES
from services.gateway.access.limits import THREAD_ABOVE_BYTES, Limits
from services.gateway.cluster.base_models import BaseModel
from services.gateway.edge.http.body import end_of, received, skimmed
from services.gateway.edge.http.codec import forward_backward_in, forward_in, head, messages
from services.gateway.edge.http.codec.long_lists import MOST_REST_BYTES
from services.gateway.edge.http.routes import Call, numbered, promise, refused, reply
from services.gateway.records.checkpoint import CheckpointRecord
from services.gateway.records.model import ModelRecord
from services.gateway.training.saves import SaveOptions
from tinsmith.internal.v1 import tinker_pb2
from tinsmith.v1 import models_pb2, training_pb2


async def create_model(call: Call) -> Response:
    body = await call.json(messages.CreateModel)
    if body.lora_config is None:
        raise InvalidRequest("lora_config is missing; a rank of 0 trains all weights")
    _check_optimizer_config(body.optimizer_config)
    request_id = await call.app.models.create(
        call.owner,
        body.session_id,
        body.model_seq_id,
        body.base_model,
        _adapter(body.lora_config),
        body.user_metadata,
    )
    return reply({"request_id": request_id})


def _adapter(given: messages.LoraConfig) -> models_pb2.LoraConfig | None:
    """The adapter to train; None: all weights. Those start from the base's, so a seed changes nothing."""
    if given.rank == 0:
        if not (given.train_attn and given.train_mlp and given.train_unembed):
            raise InvalidRequest(
                "rank 0 trains all weights; leave train_attn, train_mlp and train_unembed true, or set a rank"
            )
        return None
    return models_pb2.LoraConfig(
        rank=given.rank,
        seed=given.seed,
        train_attn=given.train_attn,
        train_mlp=given.train_mlp,
        train_unembed=given.train_unembed,
    )


def lora_fields(record: ModelRecord | CheckpointRecord) -> dict[str, Any]:
    """How the SDK is told what of a model is trained."""
    if record.lora_rank == 0:
        return {"is_lora": False}
    return {"is_lora": True, "lora_rank": record.lora_rank}


def _unserved(optimizer: object) -> InvalidRequest:
    why = "what it does is not public, only the names of its settings are; " * (optimizer == "dimuon")
    return InvalidRequest(
        f"optimizer {str(optimizer)[:100]!r} is not served: {why}use AdamOptimizerConfig, the default, and "
        "step with AdamParams",
        "unserved_optimizer",
    )


def _check_optimizer_config(config: Mapping[str, Any] | None) -> None:
    if config is not None and config != {"type": "adamw"}:
        raise _unserved(config.get("type"))


async def get_info(call: Call) -> Response:
    body = await call.json(messages.GetInfo)
    record = await call.app.models.get(call.owner, body.model_id)
    base = await call.app.models.base_of(record)
    model_data = {"arch": base.arch, "model_name": base.name}
    tokenizer = _tokenizer_id(base, call.from_this_machine)
    if tokenizer is not None:
        model_data["tokenizer_id"] = tokenizer
    return reply(
        {
            "type": "get_info",
            "model_id": record.model_id,
            "model_name": base.name,
            "model_data": model_data,
            "optimizer_config": {"type": "adamw"},
            **lora_fields(record),
        }
    )


def _tokenizer_id(base: BaseModel, from_this_machine: bool) -> str | None:
    """Where the client can load the tokenizer from. A directory of this machine means nothing to a
    client elsewhere, which then loads the tokenizer by the base model's name."""
    tokenizer = base.tokenizer_id
    if not Path(tokenizer).is_absolute():
        return tokenizer or None
    return tokenizer if from_this_machine and Path(tokenizer).is_dir() else None


async def forward_backward(call: Call) -> Response:
    limits = call.app.limits
    with call.budget.account(call.owner) as account:
        try:
            _check_content_type(call)
            data = await received(
                call.request,
                account,
                limits.training_body_bytes,
                limits.inflated_body_bytes,
                lambda beginning: forward_backward_in.check_beginning(beginning, limits),
            )
            message, dense = await _read(forward_backward_in.parse_request, data, limits)
            size = len(data) + dense
            del data
            account.hold(size)
        except TinsmithError as error:
            return await refused(call, error, head.in_message)
        return await _accept(call, message, size)


async def forward(call: Call) -> Response:
    """A forward pass, for `forward` and custom losses of SDKs before 0.22, which send it as JSON."""
    limits = call.app.limits
    with call.budget.account(call.owner) as account:
        try:
            data = await received(call.request, account, limits.sample_body_bytes)
            # Before it is known what becomes of it: of "1," in a long list a number of 8 bytes, which is
            # there three times at once, and of what is no long list an object.
            account.hold(3 * len(data) + JSON_TIMES * min(len(data), MOST_REST_BYTES))
            message, dense = await _read(forward_in.parse_request, data, limits)
            size = message.ByteSize() + dense
            del data
            account.hold(size)
        except TinsmithError as error:
            # Model and number stand at its end.
            account.close()
            await skimmed(call.request, limits.inflated_body_bytes)
            return await refused(call, error, lambda beginning: head.in_json(beginning, end_of(call.request)))
        return await _accept(call, message, size)


async def _accept(call: Call, message: tinker_pb2.TinkerForwardBackwardRequest, size: int) -> Response:
    def build(base: BaseModel) -> training_pb2.ForwardBackward:
        stand_in = call.app.limits.stable_reinforce_as
        return forward_backward_in.forward_backward(message, base.vocab_size, stand_in)

    request_id = await call.app.models.forward_backward(
        call.owner, message.model_id, message.seq_id, size, message, build
    )
    return promise(request_id, message.model_id)


def _check_content_type(call: Call) -> None:
    content_type = call.request.headers.get("content-type", "")
    if not content_type.startswith("application/x-protobuf"):
        raise InvalidRequest(
            f"content-type {content_type[:100]!r} is not taken; send the protobuf of tinker 0.38 "
            "(application/x-protobuf)"
        )


async def _read(
    parse: Callable[[bytes, Limits], tinker_pb2.TinkerForwardBackwardRequest], data: bytes, limits: Limits
) -> tuple[tinker_pb2.TinkerForwardBackwardRequest, int]:
    """The request, and the bytes of its sparse tensors once they are dense."""

    def read() -> tuple[tinker_pb2.TinkerForwardBackwardRequest, int]:
        message = parse(data, limits)
        return message, forward_backward_in.sparse_bytes(message, limits)

    return await COMPUTE.run(read) if len(data) > THREAD_ABOVE_BYTES else read()


async def optim_step(call: Call) -> Response:
    async def accept(body: messages.OptimStep) -> Response:
        if body.optimizer_params is not None:
            error = _unserved(body.optimizer_params.get("type"))
            return promise(await models.refuse(call.owner, body.model_id, body.seq_id, error), body.model_id)
        given = body.adam_params or messages.AdamParams()
        adam = training_pb2.AdamParams(
            learning_rate=given.learning_rate,
            beta1=given.beta1,
            beta2=given.beta2,
            eps=given.eps,
            weight_decay=given.weight_decay,
            grad_clip_norm=given.grad_clip_norm,
        )
        request_id = await models.optim_step(call.owner, body.model_id, body.seq_id, adam)
        return promise(request_id, body.model_id)

    models = call.app.models
    return await numbered(call, messages.OptimStep, accept)


async def save_weights(call: Call) -> Response:
    async def accept(body: messages.SaveWeights) -> Response:
        request_id = await call.app.saves.save_state(
            call.owner, body.model_id, body.seq_id, body.path, body.overwrite, _options(body)
        )
        return promise(request_id, body.model_id)

    return await numbered(call, messages.SaveWeights, accept)


def _options(body: messages.SaveWeights | messages.SaveWeightsForSampler) -> SaveOptions:
    return SaveOptions(body.ttl_seconds, body.user_metadata)


async def save_weights_for_sampler(call: Call) -> Response:
    async def accept(body: messages.SaveWeightsForSampler) -> Response:
        saves = call.app.saves
        try:
            named = _is_named(body)
        except InvalidRequest as error:
            request_id = await call.app.models.refuse(call.owner, body.model_id, body.seq_id, error)
            return promise(request_id, body.model_id)
        if named:
            request_id = await saves.save_for_sampler(
                call.owner, body.model_id, body.seq_id, body.path or "", _options(body)
            )
        else:
            request_id, _ = await saves.save_for_sampling_session(
                call.owner,
                body.model_id,
                body.seq_id,
                body.sampling_session_seq_id or 0,
                inflight=body.kind == "inflight",
            )
        return promise(request_id, body.model_id)

    return await numbered(call, messages.SaveWeightsForSampler, accept)


def _is_named(body: messages.SaveWeightsForSampler) -> bool:
    """Whether a named checkpoint is asked for, and not a sampling session.

    Raises:
        InvalidRequest: the body asks for both, for neither, or for what is not served.
    """
    if body.kind == "inflight" and body.path is not None:
        raise InvalidRequest("a named checkpoint never changes; leave path out, or use the kind 'snapshot'")
    if (body.path is None) == (body.sampling_session_seq_id is None):
        raise InvalidRequest("pass either path (a named checkpoint) or sampling_session_seq_id")
    if body.path is None and (body.ttl_seconds is not None or body.user_metadata is not None):
        raise InvalidRequest("ttl_seconds and user_metadata belong to named checkpoints; pass path too")
    return body.path is not None


async def load_weights(call: Call) -> Response:
    async def accept(body: messages.LoadWeights) -> Response:
        if body.session_id is not None and body.model_seq_id is not None:
            if body.model_id is not None or body.seq_id is not None:
                raise InvalidRequest("pass session_id and model_seq_id, or model_id and seq_id, not both")
            return await _create_from_state(call, body, body.session_id, body.model_seq_id)
        if body.model_id is None or body.seq_id is None:
            raise InvalidRequest("pass session_id and model_seq_id, or model_id and seq_id")
        return await _load_state(call, body, body.model_id, body.seq_id)

    return await numbered(call, messages.LoadWeights, accept)


async def _create_from_state(
    call: Call, body: messages.LoadWeights, session_id: str, model_seq_id: int
) -> Response:
    _check_optimizer_config(body.optimizer_config)
    request_id = await call.app.models.create_from_state(
        call.owner,
        session_id,
        model_seq_id,
        body.path,
        body.optimizer,
        body.base_model,
        body.user_metadata,
        await reader(call, body.weights_access_token),
    )
    return reply({"request_id": request_id})


async def _load_state(call: Call, body: messages.LoadWeights, model_id: str, seq_id: int) -> Response:
    try:
        allowed = await reader(call, body.weights_access_token)
        for name in ("session_id", "model_seq_id", "base_model", "user_metadata", "optimizer_config"):
            if getattr(body, name) is not None:
                raise InvalidRequest(
                    f"{name} has no meaning when loading into an existing model; leave it out"
                )
    except TinsmithError as error:
        if error.category != "user":
            # The same request may be right later, with the same number.
            raise
        return promise(await call.app.models.refuse(call.owner, model_id, seq_id, error), model_id)
    request_id = await call.app.saves.load_state(
        call.owner, model_id, seq_id, body.path, body.optimizer, allowed
    )
    return promise(request_id, model_id)


async def reader(call: Call, token: str | None) -> str | None:
    """Whose checkpoint may be loaded: that of the key which is passed as an access token.

    Raises:
        PermissionDenied: it is no key, or one that may not read checkpoints.
        Unavailable: nobody can tell at present.
        Overloaded: too many wrong keys are sent.
    """
    if token is None:
        return None
    try:
        passed = await call.app.door.caller(token, "ReadExternalWeights", call.address, beside=True)
    except Unauthenticated as error:
        raise PermissionDenied(
            "weights_access_token is no API key of this cluster; pass one of the account that the checkpoint "
            "belongs to, or have it published"
        ) from error
    return passed.owner
