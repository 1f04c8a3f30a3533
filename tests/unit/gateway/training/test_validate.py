"""What is refused before it is accepted, and what the refusal says."""

import dataclasses
import tracemalloc

import pytest

from services.common.contract.errors import InvalidRequest, TooLarge
from services.common.contract.experts.routing import Routing
from services.gateway.access.limits import Limits
from services.gateway.cluster.base_models import BaseModel
from services.gateway.training import validate
from tests.unit.gateway.tensors import tensor
from tinsmith.v1 import models_pb2, training_pb2, types_pb2

LIMITS = Limits()
MODEL = BaseModel("org/name", "/models/name", "Qwen3ForCausalLM", vocab_size=100, context_length=16)


def batch(tokens: list, targets: list, weights: list) -> training_pb2.ForwardBackward:
    operation = training_pb2.ForwardBackward(loss_fn="cross_entropy")
    datum = operation.data.add(tokens=tensor(tokens, "<i4"))
    datum.loss_inputs["target_tokens"].CopyFrom(tensor(targets, "<i8"))
    datum.loss_inputs["weights"].CopyFrom(tensor(weights, "<f4"))
    return operation


def refused(check, *args: object) -> str:
    with pytest.raises(InvalidRequest) as caught:
        check(*args)
    return caught.value.message


def test_a_good_batch_passes() -> None:
    validate.check_forward_backward(batch([1, 2], [2, 3], [0, 1]), "policy", MODEL, LIMITS)


@pytest.mark.parametrize(
    ("operation", "says"),
    [
        (training_pb2.ForwardBackward(loss_fn="cross_entropy"), "empty"),
        (batch([1, 100], [2, 3], [0, 1]), "vocabulary"),
        (batch([1, -1], [2, 3], [0, 1]), "vocabulary"),
        (batch([1, 2], [2, 100], [0, 1]), "vocabulary"),
        (batch([1, 2], [2], [0]), "positions"),
        (batch([1, 2], [2, 3], [1]), "positions"),
        (batch(list(range(17)), list(range(17)), [1] * 17), "context"),
        (batch([], [], []), "empty"),
    ],
)
def test_a_batch_that_the_model_cannot_take_is_refused(
    operation: training_pb2.ForwardBackward, says: str
) -> None:
    assert says in refused(validate.check_forward_backward, operation, "policy", MODEL, LIMITS)


def test_a_sequence_beyond_the_trainers_memory_is_refused_with_both_numbers() -> None:
    model = dataclasses.replace(MODEL, max_sequence_tokens=8)
    operation = batch([1] * 8, [1] * 8, [1] * 8)
    validate.check_forward_backward(operation, "policy", model, LIMITS)
    operation.data.append(batch([1] * 9, [1] * 9, [1] * 9).data[0])
    said = refused(validate.check_forward_backward, operation, "policy", model, LIMITS)
    assert "data[1]: 9 tokens are more than the 8 of one sequence" in said
    operation.forward_only = True
    validate.check_forward_backward(operation, "policy", model, LIMITS)


def test_a_sequence_that_only_runs_forward_has_a_limit_of_its_own_and_is_refused_with_both_numbers() -> None:
    model = dataclasses.replace(MODEL, max_sequence_tokens=4, max_forward_tokens=8)
    operation = batch([1] * 8, [1] * 8, [1] * 8)
    operation.forward_only = True
    validate.check_forward_backward(operation, "policy", model, LIMITS)
    operation.data.append(batch([1] * 9, [1] * 9, [1] * 9).data[0])
    said = refused(validate.check_forward_backward, operation, "policy", model, LIMITS)
    assert "data[1]: 9 tokens are more than the 8 of one sequence" in said
    assert "holds in a forward pass" in said


def test_an_operation_beyond_the_trainers_memory_is_refused_with_both_numbers() -> None:
    model = dataclasses.replace(MODEL, max_sequence_tokens=16, max_operation_tokens=20)
    operation = batch([1] * 10, [1] * 10, [1] * 10)
    operation.data.append(operation.data[0])
    validate.check_forward_backward(operation, "policy", model, LIMITS)
    operation.data.append(operation.data[0])
    said = refused(validate.check_forward_backward, operation, "policy", model, LIMITS)
    assert "30 tokens, more than the 20 of one operation" in said


def test_an_unknown_loss_is_refused_with_the_known_ones() -> None:
    operation = batch([1, 2], [2, 3], [0, 1])
    operation.loss_fn = "stable_reinforce"
    assert "importance_sampling" in refused(
        validate.check_forward_backward, operation, "policy", MODEL, LIMITS
    )


def test_targets_of_the_wrong_dtype_are_refused() -> None:
    operation = batch([1, 2], [2, 3], [0, 1])
    operation.data[0].loss_inputs["target_tokens"].CopyFrom(tensor([2, 3], "<f4"))
    assert "int64" in refused(validate.check_forward_backward, operation, "policy", MODEL, LIMITS)


def test_too_many_datums_are_refused() -> None:
    operation = batch([1], [2], [1])
    operation.data.extend([operation.data[0]] * 2)
    assert "at most 2" in refused(
        validate.check_forward_backward, operation, "policy", MODEL, Limits(datums=2)
    )


def test_a_batch_of_too_many_bytes_is_refused() -> None:
    operation = batch([1, 2], [2, 3], [0, 1])
    with pytest.raises(TooLarge):
        validate.check_forward_backward(operation, "policy", MODEL, Limits(operation_bytes=50))


def adam(**changes: float) -> training_pb2.AdamParams:
    defaults = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12}
    return training_pb2.AdamParams(**{**defaults, **changes})


@pytest.mark.parametrize("grad_clip_norm", [0.0, 1.0, -1.0])
def test_the_sdks_default_step_passes_whatever_its_clip_norm(grad_clip_norm: float) -> None:
    validate.check_adam(adam(grad_clip_norm=grad_clip_norm))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", -1e-4),
        ("learning_rate", float("nan")),
        ("learning_rate", float("inf")),
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("eps", 0.0),
        ("weight_decay", -1.0),
        ("grad_clip_norm", float("nan")),
    ],
)
def test_adam_outside_of_its_domain_is_refused_by_name(name: str, value: float) -> None:
    assert name in refused(validate.check_adam, adam(**{name: value}))


def lora(rank: int, **flags: bool) -> models_pb2.LoraConfig:
    return models_pb2.LoraConfig(rank=rank, **(flags or {"train_attn": True}))


def test_ranks_are_bounded_by_the_service_and_by_what_serves_the_model() -> None:
    small = BaseModel("org/name", "", "", 100, 16, max_train_rank=0, max_sample_rank=8)
    validate.check_lora(lora(8), "policy", small, LIMITS)
    assert "--max-lora-rank" in refused(validate.check_lora, lora(9), "policy", small, LIMITS)
    assert "256" in refused(validate.check_lora, lora(257), "policy", MODEL, LIMITS)
    assert "train all weights" in refused(validate.check_lora, lora(0), "policy", MODEL, LIMITS)


def test_an_adapter_that_adapts_nothing_is_refused() -> None:
    assert "at least one" in refused(validate.check_lora, lora(8, train_attn=False), "policy", MODEL, LIMITS)


def test_a_critic_trains_its_head_and_fits_no_sampler() -> None:
    small = BaseModel("org/name", "", "", 100, 16, max_train_rank=0, max_sample_rank=8)
    validate.check_lora(lora(9, train_unembed=True), "critic", small, LIMITS)
    says = refused(validate.check_lora, lora(8, train_attn=True), "critic", MODEL, LIMITS)
    assert "set it to true" in says


def test_the_losses_of_a_model_are_those_of_its_role() -> None:
    operation = batch([1, 2], [2, 3], [0, 1])
    assert "ppo_critic" in refused(validate.check_forward_backward, operation, "critic", MODEL, LIMITS)
    operation.loss_fn = "ppo_critic"
    assert "model_role" in refused(validate.check_forward_backward, operation, "policy", MODEL, LIMITS)


def test_experts_to_replay_are_those_of_the_trainers_model() -> None:
    routes = dataclasses.replace(MODEL, trained_routing=Routing(layers=1, top_k=2, experts=4))
    operation = batch([1, 2], [2, 3], [0, 1])
    check = (validate.check_forward_backward, operation, "policy")
    operation.data[0].routed_experts.CopyFrom(
        types_pb2.RoutedExperts(ids=bytes([0, 1, 3, 2]), shape=[2, 1, 2])
    )
    validate.check_forward_backward(operation, "policy", routes, LIMITS)
    with pytest.raises(InvalidRequest, match="replay no routed_experts") as caught:
        validate.check_forward_backward(operation, "policy", MODEL, LIMITS)
    assert caught.value.code == "routed_experts_not_supported"
    operation.data[0].routed_experts.ids = bytes([0, 1, 3, 4])
    assert "data[0]: routed_experts has expert 4" in refused(*check, routes, LIMITS)
    operation.data[0].routed_experts.shape[0] = 1
    assert "for 2 tokens it must be [2, 1, 2]" in refused(*check, routes, LIMITS)


def test_a_shape_of_millions_of_sizes_is_refused_without_reading_them() -> None:
    routes = dataclasses.replace(MODEL, trained_routing=Routing(layers=1, top_k=2, experts=4))
    operation = batch([1, 2], [2, 3], [0, 1])
    operation.data[0].routed_experts.shape.extend([2] * 1_000_000)
    tracemalloc.start()
    try:
        says = refused(validate.check_forward_backward, operation, "policy", routes, LIMITS)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "routed_experts has the shape [2, 2, 2, 2]" in says
    assert peak < 1 << 20
