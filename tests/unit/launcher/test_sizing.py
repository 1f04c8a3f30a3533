"""What a model needs: the arithmetic against published counts, a real adapter and real activations."""

from __future__ import annotations

import pytest
import torch

from services.launcher.doctor import sizing
from services.launcher.doctor.sizing import GIB, PUBLISHED, Load, Shape

TINY = Shape(2, 256, 768, 8, 4, 32, 64, True)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("SmolLM2-135M", 0.1345),
        ("Qwen3-0.6B", 0.596),
        ("Qwen3-8B", 8.19),
        ("Qwen3-32B", 32.76),
        ("Qwen2.5-72B", 72.7),
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


def test_an_adapter_has_as_many_parameters_as_the_trainer_gives_it() -> None:
    from services.trainer.compute.data import LoraSpec
    from services.trainer.compute.lora.adapter import Adapter, LinearShape

    linears = [pair for _ in range(TINY.layers) for pair in TINY.linears]
    targets = {str(index): LinearShape(*pair) for index, pair in enumerate(linears)}
    targets["lm_head"] = LinearShape(TINY.hidden, TINY.vocabulary)
    adapter = Adapter(LoraSpec(rank=8), targets, "s:train:0", "cpu", TINY.hidden)
    assert TINY.adapter_parameters(8) == adapter.flat.numel()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_activations_are_what_pytorch_keeps_for_the_backward_pass(dtype: str) -> None:
    element = getattr(torch, dtype)
    tokens = 256
    # What does not grow with the tokens, casts of adapters above all, cancels out.
    measured = (_kept(TINY, 2 * tokens, element) - _kept(TINY, tokens, element)) / tokens
    expected = TINY.activation_bytes(element.itemsize)
    assert expected == pytest.approx(measured, rel=0.06)


def _kept(shape: Shape, tokens: int, element: torch.dtype) -> int:
    """Bytes that autograd keeps for one sequence of a frozen model with the trainer's adapters."""
    from transformers import Qwen3Config, Qwen3Model

    from services.trainer.compute.data import LoraSpec
    from services.trainer.compute.lora.adapter import Adapter, LinearShape
    from services.trainer.compute.lora.grouped import LoraRouter, Segment

    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        num_hidden_layers=shape.layers,
        attn_implementation="sdpa",
    )
    model = Qwen3Model(config).to(element)
    model.requires_grad_(False)
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    linears = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    router = LoraRouter()
    for name, linear in linears.items():
        router.hook(linear, name)
    targets = {name: LinearShape(linear.in_features, linear.out_features) for name, linear in linears.items()}
    adapter = Adapter(LoraSpec(rank=4), targets, "s:train:0", "cpu", shape.hidden, element)
    segment = Segment(tokens, adapter, torch.zeros_like(adapter.flat))
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    saved = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with router.route([segment]), saved:
        output = model(input_ids=torch.zeros(1, tokens, dtype=torch.int64))
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
