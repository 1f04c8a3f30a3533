"""What a model needs: the arithmetic against published counts, a real adapter and real activations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from services.common.contract.errors import InvalidRequest
from services.launcher.doctor import sizing
from services.launcher.doctor.command import from_config
from services.launcher.doctor.sizing import GIB, PUBLISHED, Experts, LinearAttention, Load, Shape

TINY = Shape(2, 256, 768, 8, 4, 32, 64, True)
TINY_EXPERTS = Shape(2, 256, 768, 8, 4, 32, 64, True, Experts(16, 4, 192))


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("SmolLM2-135M", 0.1345),
        ("Qwen3-0.6B", 0.596),
        ("Qwen3-8B", 8.19),
        ("Qwen3-32B", 32.76),
        ("Qwen2.5-72B", 72.7),
        ("Qwen3-30B-A3B", 30.53),
        ("gpt-oss-20b", 20.91),
        ("gpt-oss-120b", 116.83),
    ],
)
def test_the_shapes_have_the_parameters_that_their_makers_publish(name: str, billions: float) -> None:
    assert PUBLISHED[name].parameters / 1e9 == pytest.approx(billions, rel=0.003)


def test_a_size_is_near_the_model_that_is_called_by_it() -> None:
    assert sizing.nearest(8_000_000_000) == "Qwen3-8B"
    assert sizing.nearest(100_000_000) == "SmolLM2-135M"
    assert sizing.nearest(70_000_000_000) == "Qwen2.5-72B"


def test_a_size_far_from_every_model_is_near_none() -> None:
    assert sizing.nearest(400_000_000_000) is None
    assert sizing.nearest(10_000_000) is None


SIZES = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "tie_word_embeddings": False,
}
LAYERS = ["linear_attention", "linear_attention", "full_attention"]
LINEAR = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 40,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_moe": {"num_experts": 16, "moe_intermediate_size": 192, "mlp_only_layers": [1]},
    "qwen2_moe": {
        "num_experts": 16,
        "moe_intermediate_size": 192,
        "shared_expert_intermediate_size": 320,
    },
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4},
    "glm4_moe": {"n_routed_experts": 16, "moe_intermediate_size": 192, "n_shared_experts": 1},
    "qwen3_next": {
        "num_experts": 16,
        "moe_intermediate_size": 192,
        "shared_expert_intermediate_size": 320,
        "layer_types": LAYERS,
        **LINEAR,
    },
    "qwen3_5_text": {"layer_types": LAYERS, **LINEAR},
    "qwen3_5_moe_text": {
        "num_experts": 16,
        "moe_intermediate_size": 192,
        "shared_expert_intermediate_size": 320,
        "layer_types": LAYERS,
        **LINEAR,
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_and_its_adapter_have_as_many_parameters_as_the_trainer_makes(family: str) -> None:
    from services.trainer.compute.lora.adapter import largest, layout_of, select_targets
    from services.trainer.compute.lora.targets import find_linears

    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family]})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape, linears = from_config(config.to_dict()), find_linears(model)
    assert shape.parameters == pytest.approx(sum(each.numel() for each in model.parameters()), rel=0.004)
    _, elements = layout_of(select_targets(linears, largest(linears, 8)), 8, 0)
    assert shape.adapter_parameters(8) == elements


@pytest.mark.parametrize(
    "kind",
    [
        {"kv_lora_rank": 512},
        {"layer_types": ["linear_attention"]},
        {"model_type": "other_next", "full_attention_interval": 4, "linear_num_key_heads": 16},
        {"moe_num_experts": 64},
        {"expert_layer_period": 2},
        {"interleave_moe_layer_step": 2},
    ],
)
def test_what_is_not_counted_is_refused(kind: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match="not counted"):
        from_config({"num_attention_heads": 8, "hidden_size": 256, **kind})


def test_layers_with_linear_attention_are_counted_by_how_many_have_full_attention() -> None:
    config = AutoConfig.for_model("qwen3_5_text", num_hidden_layers=10, full_attention_interval=4, **LINEAR)
    said = from_config({**config.to_dict(), "layer_types": None})
    assert said.linear is not None and said.linear.layers == config.layer_types.count("linear_attention") == 8
    assert said == from_config(config.to_dict())
    # As published: of a model that reads pictures too.
    text = {**config.to_dict(), "mamba_ssm_dtype": "float32"}
    del text["tie_word_embeddings"]
    both = {"model_type": "qwen3_5", "tie_word_embeddings": True, "text_config": text}
    assert replace(said, tied=True) == from_config(both)


def test_linear_attention_has_a_state_for_each_sequence_and_no_keys_and_values() -> None:
    hybrid = replace(TINY, layers=8, linear=LinearAttention(6, 4, 8, 24, 40, 4, fused=False))
    assert hybrid.kv_bytes(2) == TINY.kv_bytes(2), "two layers have some"
    assert hybrid.state_bytes(2) == 6 * (4 * 8 * 24 * 40 + 2 * 3 * (2 * 4 * 24 + 8 * 40))
    load = Load(item=2, micro_batch_tokens=1024, context=100)
    assert sizing.sampler_bytes(hybrid, load)["keys and values"] == 2 * (
        100 * hybrid.kv_bytes(2) + hybrid.state_bytes(2)
    )


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
@pytest.mark.parametrize(("dtype", "item"), [("bfloat16", 2), ("float32", 4)])
def test_activations_of_linear_attention_are_about_what_the_trainer_counts(
    family: str, dtype: str, item: int
) -> None:
    from services.trainer.compute.memory.capacity import footprint

    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family]})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    counted = footprint(model, item, checkpointing=item == 2, ranks=1)
    shape = from_config(config.to_dict())
    # The trainer's has what is around the blocks besides.
    around = 4 * shape.hidden * item
    assert shape.kept_bytes(item) == pytest.approx(counted.token - around, rel=0.25)


@pytest.mark.parametrize("shape", [TINY, TINY_EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_activations_are_what_pytorch_keeps_for_the_backward_pass(dtype: str, shape: Shape) -> None:
    element = getattr(torch, dtype)
    tokens = 256
    # What does not grow with the tokens, casts of adapters above all, cancels out.
    measured = (_kept(shape, 2 * tokens, element) - _kept(shape, tokens, element)) / tokens
    expected = shape.activation_bytes(element.itemsize)
    assert expected == pytest.approx(measured, rel=0.06)


def _kept(shape: Shape, tokens: int, element: torch.dtype) -> int:
    """Bytes that autograd keeps for one sequence of a frozen model with the trainer's adapters."""
    from services.trainer.compute.data import LoraSpec
    from services.trainer.compute.lora.adapter import HEAD, Adapter
    from services.trainer.compute.lora.grouped import LoraRouter
    from services.trainer.compute.lora.stack import Segment
    from services.trainer.compute.lora.targets import find_linears, hook_adapters

    routed = shape.experts
    experts = (
        {}
        if routed is None
        else {
            "num_experts": routed.count,
            "num_experts_per_tok": routed.active,
            "moe_intermediate_size": routed.inner,
        }
    )
    config = AutoConfig.for_model(
        "qwen3" if routed is None else "qwen3_moe",
        **experts,
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        num_hidden_layers=shape.layers,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=element)
    model.requires_grad_(False)
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    router = LoraRouter()
    hook_adapters(model, router)
    targets = {name: linear for name, linear in find_linears(model).items() if name != HEAD}
    adapter = Adapter(LoraSpec(rank=4), targets, "s:train:0", "cpu", shape.hidden, element)
    segment = Segment(tokens, adapter, torch.zeros_like(adapter.flat))
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    saved = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with router.route([segment]), saved:
        output = model.base_model(input_ids=torch.zeros(1, tokens, dtype=torch.int64))
    assert output.last_hidden_state.requires_grad
    return sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in weights)


def test_a_smaller_micro_batch_is_found_when_the_largest_does_not_fit() -> None:
    shape, load = PUBLISHED["Qwen3-8B"], Load(item=2, micro_batch_tokens=8192)
    assert sizing.largest_micro_batch(shape, load, 80 * GIB) == 8192
    smaller = sizing.largest_micro_batch(shape, load, 22 * GIB)
    assert smaller == 4096
    taken = sizing.trainer_bytes(shape, Load(item=2, micro_batch_tokens=smaller))
    assert sum(taken.values()) <= 22 * GIB
    assert sizing.largest_micro_batch(shape, load, 16 * GIB) == 0
