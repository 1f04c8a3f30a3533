"""Between the protobuf Operation and what the trainer works with.

Invariant: work that comes out of `from_pb` can be cut into units and sent to every rank; what else is wrong
with its data the engine finds, on all ranks alike, before it computes anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.common.contract import ids, roles, tensors
from services.common.contract.errors import InvalidRequest
from services.common.contract.experts import routing
from services.common.contract.experts.routing import RoutedExperts, Routing
from services.common.contract.tensors import DTYPES, HostTensor
from services.trainer.compute.data import AdamSpec, LoraSpec, RowResult
from services.trainer.compute.losses import combine_metrics
from services.trainer.order.microbatch import Unit, split_operation
from services.trainer.order.prefixes import told_apart
from tinsmith.internal.v1 import operation_pb2
from tinsmith.v1 import checkpoints_pb2, models_pb2, results_pb2, training_pb2


@dataclass(frozen=True)
class Target:
    """What operations are for.

    Attributes:
        base_model: registered name of the base model.
        unit_tokens: most tokens of one unit of work; an operation may have been journaled with fewer.
        shares_prefixes: the trainer computes shared prefixes once, see `compute.engine.Engine`.
        splits: its ranks compute sequences together that none of them holds alone.
        one_rank_tokens: of the longest sequence that one of them holds in training, where that is not every
            one; 0 = it is. An operation may have been journaled with fewer.
        routing: how the base model routes tokens, if it computes with experts that it is given.
    """

    base_model: str
    unit_tokens: int
    shares_prefixes: bool
    splits: bool = False
    one_rank_tokens: int = 0
    routing: Routing | None = None


@dataclass(frozen=True)
class Load:
    """Replace adapter (and optimizer state) by saved ones."""

    source_model_id: str
    checkpoint_id: str
    optimizer: bool
    version: int = 0


@dataclass(frozen=True)
class Create:
    """Make a model: an adapter, or what was saved; with neither set, one that trains all weights."""

    lora: LoraSpec | None
    from_state: Load | None


@dataclass(frozen=True)
class Datum:
    """One training example. `tokens`: int32 little-endian bytes; `routed`: the experts that they go to, None
    = the model's own choice."""

    tokens: bytes
    loss_inputs: dict[str, HostTensor]
    routed: RoutedExperts | None = None


@dataclass(frozen=True)
class Forward:
    """forward or forward_backward. `units` is the work, cut for the scheduler."""

    data: tuple[Datum, ...]
    loss_fn: str
    loss_config: dict[str, float]
    forward_only: bool
    units: tuple[Unit, ...]


@dataclass(frozen=True)
class Step:
    adam: AdamSpec


@dataclass(frozen=True)
class Save:
    checkpoint_id: str
    overwrite: bool


@dataclass(frozen=True)
class Publish:
    """Snapshot for the samplers."""

    checkpoint_id: str
    sampling_session_id: str


@dataclass(frozen=True)
class Export:
    """Weights in Hugging Face's formats. `age_recipients`: public keys to encrypt every file to."""

    checkpoint_id: str
    age_recipients: tuple[str, ...] = ()


@dataclass(frozen=True)
class Unload:
    pass


Work = Create | Forward | Step | Save | Load | Publish | Export | Unload


def from_pb(operation: operation_pb2.Operation, target: Target) -> Work:
    """The work of an operation.

    Raises:
        InvalidRequest: the operation is malformed or does not fit the base model.
    """
    match operation.WhichOneof("kind"):
        case "create_model":
            return _create(operation.create_model, target)
        case "forward_backward":
            return _forward(operation, target)
        case "optim_step":
            return Step(_adam(operation.optim_step.adam))
        case "save_state":
            return Save(operation.save_state.checkpoint_id, operation.save_state.overwrite)
        case "load_state":
            return _load(operation.load_state)
        case "save_for_sampler":
            save = operation.save_for_sampler
            return Publish(save.checkpoint_id, save.sampling_session_id)
        case "save_external":
            export = operation.save_external
            return Export(export.checkpoint_id, tuple(export.age_recipients))
        case "unload_model":
            return Unload()
        case kind:
            raise InvalidRequest(f"operation kind {kind!r} is not executed by a trainer")


def _create(create: operation_pb2.CreateModel, target: Target) -> Create:
    if create.base_model != target.base_model:
        raise InvalidRequest(
            f"base model {create.base_model!r} is not served here; this trainer has {target.base_model!r}",
            "unknown_base_model",
        )
    if sum(create.HasField(kind) for kind in ("lora", "full", "from_state")) != 1:
        raise InvalidRequest("set exactly one of lora, full and from_state")
    if create.HasField("from_state"):
        if create.role:
            raise InvalidRequest("leave role out with from_state; the saved state decides it")
        return Create(None, _load(create.from_state))
    if create.HasField("full"):
        if roles.from_pb(create.role) != "policy":
            raise InvalidRequest("a critic trains an adapter; set lora", "wrong_role")
        return Create(None, None)
    lora = create.lora
    seed = lora.seed if lora.HasField("seed") else None
    role = roles.from_pb(create.role)
    return Create(LoraSpec(lora.rank, seed, lora.train_attn, lora.train_mlp, lora.train_unembed, role), None)


def _load(load: operation_pb2.LoadState) -> Load:
    return Load(load.source_model_id, load.checkpoint_id, load.optimizer, load.version)


def _adam(adam: training_pb2.AdamParams) -> AdamSpec:
    return AdamSpec(
        learning_rate=adam.learning_rate,
        beta1=adam.beta1,
        beta2=adam.beta2,
        eps=adam.eps,
        weight_decay=adam.weight_decay,
        grad_clip_norm=max(adam.grad_clip_norm, 0.0),
    )


def _forward(operation: operation_pb2.Operation, target: Target) -> Forward:
    request = operation.forward_backward
    if not request.data:
        raise InvalidRequest("data is empty; give at least one datum", "empty_data")
    data = []
    for index, pb in enumerate(request.data):
        tokens = tensors.from_pb(pb.tokens, f"data[{index}]: tokens")
        if tokens.dtype != "int32" or len(tokens.shape) != 1 or not tokens.numel:
            raise InvalidRequest(f"data[{index}]: tokens must be int32 of shape [N] with N of at least 1")
        inputs = {
            key: tensors.from_pb(value, f"data[{index}]: {key}")
            for key, value in sorted(pb.loss_inputs.items())
        }
        data.append(Datum(tokens.data, inputs, _routed(pb, target, f"data[{index}]: routed_experts")))
    # Cut as it was journaled, as far as this trainer can.
    units = split_operation(
        told_apart([datum.tokens for datum in data], [routing.ids_of(datum.routed) for datum in data]),
        min(operation.micro_batch_tokens or target.unit_tokens, target.unit_tokens),
        shared=target.shares_prefixes,
        ranks=max(1, operation.ranks),
        # What only runs forward keeps nothing for a backward pass, so one rank holds more of it.
        one_rank=_one_rank(operation, target) if target.splits and not request.forward_only else 0,
    )
    config = dict(request.loss_config)
    return Forward(tuple(data), request.loss_fn, config, request.forward_only, tuple(units))


def _one_rank(operation: operation_pb2.Operation, target: Target) -> int:
    """Tokens of the longest sequence that one rank is given: as many as were journaled, as far as this
    trainer's hold them; 0 = there is no longest."""
    limits = (operation.one_rank_tokens, target.one_rank_tokens)
    return min((tokens for tokens in limits if tokens), default=0)


def _routed(datum: training_pb2.Datum, target: Target, name: str) -> RoutedExperts | None:
    if not datum.HasField("routed_experts"):
        return None
    if target.routing is None:
        raise InvalidRequest(
            f"{name}: this trainer replays none; leave them out", "routed_experts_not_supported"
        )
    given = RoutedExperts(tuple(datum.routed_experts.shape), datum.routed_experts.ids)
    routing.check(given, target.routing, datum.tokens.shape[0], name)
    return given


def lora_to_pb(lora: LoraSpec) -> models_pb2.LoraConfig:
    """The protobuf of an adapter's shape."""
    return models_pb2.LoraConfig(
        rank=lora.rank,
        seed=lora.seed,
        train_attn=lora.train_attn,
        train_mlp=lora.train_mlp,
        train_unembed=lora.train_unembed,
    )


def created(lora: LoraSpec | None) -> results_pb2.OperationResult:
    role = roles.to_pb("policy" if lora is None else lora.role)
    shape = None if lora is None else lora_to_pb(lora)
    return results_pb2.OperationResult(create_model=models_pb2.CreateModelResult(lora=shape, role=role))


def forwarded(work: Forward, rows: Sequence[RowResult]) -> results_pb2.OperationResult:
    """The result of a forward or forward_backward whose rows are given in request order."""
    metrics = combine_metrics(work.loss_fn, [row.metrics for row in rows])
    outputs = {name: _batched([row.outputs[name] for row in rows]) for name in rows[0].outputs}
    return results_pb2.OperationResult(
        forward_backward=training_pb2.ForwardBackwardResult(outputs=outputs, metrics=metrics)
    )


def _batched(arrays: Sequence[HostTensor]) -> training_pb2.BatchedTensor:
    offsets = [0]
    for array in arrays:
        offsets.append(offsets[-1] + len(array.data))
    batched = training_pb2.BatchedTensor(
        dtype=DTYPES[arrays[0].dtype].pb, data=b"".join(array.data for array in arrays), offsets=offsets
    )
    trailing = [array.shape[1:] for array in arrays]
    if len(set(trailing)) == 1:
        batched.trailing_shape.extend(trailing[0])
    else:
        batched.columns.extend(shape[0] if shape else 0 for shape in trailing)
    return batched


def stepped(metrics: Mapping[str, float]) -> results_pb2.OperationResult:
    return results_pb2.OperationResult(optim_step=training_pb2.OptimStepResult(metrics=dict(metrics)))


def saved(model_id: str, work: Save, size_bytes: int) -> results_pb2.OperationResult:
    path = ids.tinker_path(model_id, work.checkpoint_id)
    return results_pb2.OperationResult(
        save_state=checkpoints_pb2.SaveStateResult(path=path, size_bytes=size_bytes)
    )


def loaded(work: Load) -> results_pb2.OperationResult:
    path = ids.tinker_path(work.source_model_id, work.checkpoint_id)
    return results_pb2.OperationResult(load_state=checkpoints_pb2.LoadStateResult(path=path))


def published(
    model_id: str, seq_id: int, work: Publish, size_bytes: int, wire_bytes: int, receivers: int
) -> results_pb2.OperationResult:
    path = ids.tinker_path(model_id, work.checkpoint_id) if work.checkpoint_id else ""
    return results_pb2.OperationResult(
        save_for_sampler=checkpoints_pb2.SaveForSamplerResult(
            path=path,
            sampling_session_id=work.sampling_session_id,
            version=seq_id,
            size_bytes=size_bytes,
            wire_bytes=wire_bytes,
            receivers=receivers,
        )
    )


def exported(model_id: str, work: Export, size_bytes: int) -> results_pb2.OperationResult:
    path = ids.tinker_path(model_id, work.checkpoint_id)
    return results_pb2.OperationResult(
        save_external=checkpoints_pb2.SaveExternalResult(path=path, size_bytes=size_bytes)
    )


def unloaded() -> results_pb2.OperationResult:
    return results_pb2.OperationResult(unload_model=models_pb2.UnloadModelResult())
