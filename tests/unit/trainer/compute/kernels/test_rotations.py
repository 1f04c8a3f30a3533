"""Which rotations three kernels may compute, and that they do."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn

from services.trainer.compute.kernels.rotations import NAME, _Rotation, fuse_rotations, is_plain

PLAIN = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma3", "deepseek_v3")
OTHER = ("phi3", "gpt_oss", "glm4_moe", "qwen3_next", "qwen3_5", "modernbert_decoder")
"""The last one computes in float32 whatever it is given."""


def module_of(family: str) -> Any:
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


@pytest.mark.parametrize("family", PLAIN)
def test_plain_rotations_are_found(family: str) -> None:
    assert is_plain(getattr(module_of(family), NAME))


@pytest.mark.parametrize("family", OTHER)
def test_rotations_of_another_form_are_left(family: str) -> None:
    assert not is_plain(getattr(module_of(family), NAME))


def test_it_turns_and_has_the_gradient_that_the_model_would() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, above = (torch.randn(1, 2, 7, 16, generator=generator) for _ in range(3))
    # Sines of both halves differ, though a model's are the same.
    cos, sin = torch.randn(2, 1, 1, 7, 16, generator=generator)
    given, own = (q.clone().requires_grad_() for _ in range(2))
    made = _Rotation.apply(given, cos, sin)
    expected, _ = getattr(module_of("qwen3"), NAME)(own, k, cos[:, 0], sin[:, 0])
    torch.testing.assert_close(made, expected)
    made.backward(above)
    expected.backward(above)
    torch.testing.assert_close(given.grad, own.grad)


def test_it_rounds_less_than_the_model_does() -> None:
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(1, 4, 64, 32, generator=generator).bfloat16()
    angles = torch.rand(1, 64, 16, generator=generator).repeat(1, 1, 2) * 6
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    rotate = getattr(module_of("qwen3"), NAME)
    exact, _ = rotate(q.float(), q.float(), cos.float(), sin.float())
    own, _ = rotate(q, q, cos, sin)
    made = _Rotation.apply(q, cos[:, None], sin[:, None])
    assert (made.float() - exact).norm() < (own.float() - exact).norm()


def test_nothing_but_the_model_itself_is_changed() -> None:
    qwen3 = module_of("qwen3")
    config = qwen3.Qwen3Config(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=8,
    )
    rotate, forward = getattr(qwen3, NAME), qwen3.Qwen3Attention.forward
    model = qwen3.Qwen3Model(config).eval()
    ids = torch.arange(8)[None]
    expected = model(ids).last_hidden_state
    fuse_rotations(model)
    attentions = [layer.self_attn for layer in model.layers]
    assert all(attention.forward.__func__ is not forward for attention in attentions)
    assert attentions[0].forward.__func__ is attentions[1].forward.__func__
    assert getattr(qwen3, NAME) is rotate and qwen3.Qwen3Attention.forward is forward
    # On a CPU it is the model's own.
    assert torch.equal(model(ids).last_hidden_state, expected)


def test_a_model_without_rotations_is_left() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    forward = model[0].forward
    fuse_rotations(model)
    assert model[0].forward == forward
