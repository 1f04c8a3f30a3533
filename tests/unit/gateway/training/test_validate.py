"""What is refused before it is accepted, and what the refusal says."""

import dataclasses

import numpy as np
import pytest

from services.common.contract.errors import InvalidRequest, TooLarge
from services.common.state.registry import ServiceRecord
from services.gateway.access.limits import Limits
from services.gateway.cluster import base_models
from services.gateway.cluster.base_models import BaseModel
from services.gateway.training import validate
from tinsmith.v1 import operation_pb2, tinsmith_pb2, types_pb2

LIMITS = Limits()
MODEL = BaseModel("org/name", "/models/name", "Qwen3ForCausalLM", vocab_size=100, context_length=16)


def tensor(values: list, dtype: str) -> types_pb2.Tensor:
    kinds = {
        "<i4": types_pb2.DATA_TYPE_INT32,
        "<i8": types_pb2.DATA_TYPE_INT64,
        "<f4": types_pb2.DATA_TYPE_FLOAT32,
    }
    array = np.array(values, dtype)
    return types_pb2.Tensor(dtype=kinds[dtype], shape=array.shape, data=array.tobytes())


def batch(tokens: list, targets: list, weights: list) -> operation_pb2.ForwardBackward:
    operation = operation_pb2.ForwardBackward(loss_fn="cross_entropy")
    datum = operation.data.add(tokens=tensor(tokens, "<i4"))
    datum.loss_inputs["target_tokens"].CopyFrom(tensor(targets, "<i8"))
    datum.loss_inputs["weights"].CopyFrom(tensor(weights, "<f4"))
    return operation


def sample(**changes: object) -> tinsmith_pb2.TinsmithServiceSampleRequest:
    params = operation_pb2.SamplingParams(
        temperature=1.0, top_k=-1, top_p=1.0, stop=operation_pb2.StopCondition()
    )
    params.stop.model_eos.SetInParent()
    fields: dict = {"prompt": tensor([1, 2], "<i4"), "num_samples": 1, "params": params}
    for name, value in changes.items():
        if name in operation_pb2.SamplingParams.DESCRIPTOR.fields_by_name:
            if name == "stop":
                params.stop.CopyFrom(value)
            else:
                setattr(params, name, value)
        else:
            fields[name] = value
    return tinsmith_pb2.TinsmithServiceSampleRequest(**fields)


def refused(check, *args: object) -> str:
    with pytest.raises(InvalidRequest) as caught:
        check(*args)
    return caught.value.message


def test_a_good_batch_passes() -> None:
    validate.check_forward_backward(batch([1, 2], [2, 3], [0, 1]), "policy", MODEL, LIMITS)


@pytest.mark.parametrize(
    ("operation", "says"),
    [
        (operation_pb2.ForwardBackward(loss_fn="cross_entropy"), "empty"),
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
    operation: operation_pb2.ForwardBackward, says: str
) -> None:
    assert says in refused(validate.check_forward_backward, operation, "policy", MODEL, LIMITS)


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


def adam(**changes: float) -> types_pb2.AdamParams:
    defaults = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12}
    return types_pb2.AdamParams(**{**defaults, **changes})


def test_the_sdks_default_step_passes() -> None:
    validate.check_adam(adam())


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
        ("grad_clip_norm", -1.0),
    ],
)
def test_adam_outside_of_its_domain_is_refused_by_name(name: str, value: float) -> None:
    assert name in refused(validate.check_adam, adam(**{name: value}))


def lora(rank: int, **flags: bool) -> types_pb2.LoraConfig:
    return types_pb2.LoraConfig(rank=rank, **(flags or {"train_attn": True}))


def test_ranks_are_bounded_by_the_service_and_by_what_serves_the_model() -> None:
    small = BaseModel("org/name", "", "", 100, 16, max_train_rank=0, max_sample_rank=8)
    validate.check_lora(lora(8), "policy", small, LIMITS)
    assert "--max-lora-rank" in refused(validate.check_lora, lora(9), "policy", small, LIMITS)
    assert "256" in refused(validate.check_lora, lora(257), "policy", MODEL, LIMITS)
    assert "train all weights" in refused(validate.check_lora, lora(0), "policy", MODEL, LIMITS)


def test_an_adapter_that_adapts_nothing_is_refused() -> None:
    assert "at least one" in refused(validate.check_lora, lora(8, train_attn=False), "policy", MODEL, LIMITS)


def strings(*values: str) -> operation_pb2.StopCondition:
    return operation_pb2.StopCondition(strings=operation_pb2.StopCondition.StopStrings(values=values))


def tokens(*ids: int) -> operation_pb2.StopCondition:
    return operation_pb2.StopCondition(tokens=operation_pb2.StopCondition.StopTokens(ids=ids))


@pytest.mark.parametrize(
    "request_",
    [
        sample(),
        sample(temperature=0.0, top_k=5, top_p=0.5, max_tokens=1),
        sample(stop=strings("\n\nUser:")),
        sample(stop=tokens(99)),
        sample(prompt=tensor([0] * 15, "<i4"), num_samples=1024, topk_prompt_logprobs=64),
        sample(temperature=0.01),
        sample(temperature=2.0, top_k=2**31 - 1),
    ],
)
def test_a_good_sample_passes(request_: tinsmith_pb2.TinsmithServiceSampleRequest) -> None:
    validate.check_sample(request_, MODEL, LIMITS)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_samples": 0}, "num_samples"),
        ({"num_samples": 1025}, "num_samples"),
        ({"topk_prompt_logprobs": 65}, "topk_prompt_logprobs"),
        ({"topk_sample_logprobs": -1}, "topk_sample_logprobs"),
        ({"prompt_alt_tokens_k": 65}, "prompt_alt_tokens_k"),
        ({"prompt_logprobs_last_n": 1}, "ask for one of them"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 0}, "prompt_logprobs_last_n"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 99}, "prompt_logprobs_last_n"),
        ({"target_prompt_logprobs": types_pb2.Matrix(shape=[1, 1])}, "target_prompt_logprobs"),
        ({"prompt": tensor([], "<i4")}, "empty"),
        ({"prompt": tensor([0] * 16, "<i4")}, "shorten"),
        ({"prompt": tensor([1, 100], "<i4")}, "position 1"),
        ({"prompt": tensor([1, -1], "<i4")}, "vocabulary"),
        ({"prompt": tensor([1, 2], "<i8")}, "int32"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 0.009}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": float("nan")}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"stop": strings("")}, "stop string"),
        ({"stop": strings(*["x"] * 65)}, "64"),
        ({"stop": tokens(100)}, "stop token 100"),
        ({"stop": operation_pb2.StopCondition()}, "stop is not set"),
        ({"seq_id": -1}, "seq_id"),
    ],
)
def test_a_sample_that_cannot_be_run_is_refused(changes: dict, says: str) -> None:
    assert says in refused(validate.check_sample, sample(**changes), MODEL, LIMITS)


def test_more_samples_than_the_smallest_sampler_takes_are_refused() -> None:
    small = dataclasses.replace(MODEL, max_samples=8)
    validate.check_sample(sample(num_samples=8), small, LIMITS)
    assert "1 to 8" in refused(validate.check_sample, sample(num_samples=9), small, LIMITS)


def test_what_a_request_may_sample_in_all_is_bounded_by_what_its_context_leaves() -> None:
    large = dataclasses.replace(MODEL, context_length=2**15)
    for max_tokens in (2**14, None):
        wanted = sample(num_samples=1024)
        if max_tokens:
            wanted.params.max_tokens = max_tokens
            validate.check_sample(wanted, large, LIMITS)
        else:
            assert "tokens; lower max_tokens" in refused(validate.check_sample, wanted, large, LIMITS)
    # No more than the context leaves is sampled, whatever max_tokens says.
    validate.check_sample(sample(num_samples=1024, max_tokens=2**31 - 1), MODEL, LIMITS)


def test_lifetimes_are_bounded() -> None:
    validate.check_ttl(None, LIMITS)
    validate.check_ttl(3600, LIMITS)
    for ttl in (0, -1, 3599, 10**10):
        assert "ttl_seconds" in refused(validate.check_ttl, ttl, LIMITS)


def test_metadata_is_bounded() -> None:
    validate.check_metadata({"a": "b"}, LIMITS)
    assert "user_metadata" in refused(validate.check_metadata, {"a": "b" * 70_000}, LIMITS)


def record(kind: str, name: str, **fields: object) -> ServiceRecord:
    defaults: dict = {"vocab_size": 100, "context_length": 64, "model_path": "/models/x", "arch": "A"}
    return ServiceRecord(kind=kind, id=f"{kind}-0", address="h:1", base_model=name, **{**defaults, **fields})


def test_the_smallest_limit_of_all_replicas_holds() -> None:
    models = base_models.merge(
        [record("trainer", "a/b", context_length=64)],
        [
            record("sampler", "a/b", context_length=32, max_lora_rank=64, max_sequences=512),
            record("sampler", "a/b", context_length=48, max_lora_rank=16, max_sequences=2048),
            record("sampler", "c/d"),
        ],
    )
    assert models["a/b"].context_length == 32
    assert models["a/b"].max_sample_rank == 16
    assert models["a/b"].max_samples == 512
    assert models["a/b"].trainable and models["a/b"].sampleable
    assert models["c/d"].sampleable and not models["c/d"].trainable


def test_the_tokenizer_of_a_hub_model_is_named_by_its_hub_id() -> None:
    cached = "/root/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/abc"
    assert BaseModel("n", cached, "", 1, 1).tokenizer_id == "Qwen/Qwen3-0.6B"
    assert BaseModel("n", "Qwen/Qwen3-0.6B", "", 1, 1).tokenizer_id == "Qwen/Qwen3-0.6B"
    assert BaseModel("n", "/models/tiny", "", 1, 1).tokenizer_id == "/models/tiny"


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
