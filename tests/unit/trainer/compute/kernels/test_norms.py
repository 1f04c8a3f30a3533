"""Which norms torch's own kernel may compute, and that it computes them."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from services.trainer.compute.kernels.norms import fuse_norms, is_plain

PLAIN = {
    "llama": "LlamaRMSNorm",
    "mistral": "MistralRMSNorm",
    "mixtral": "MixtralRMSNorm",
    "qwen2": "Qwen2RMSNorm",
    "qwen3": "Qwen3RMSNorm",
    "qwen3_moe": "Qwen3MoeRMSNorm",
    "phi3": "Phi3RMSNorm",
    "glm4_moe": "Glm4MoeRMSNorm",
    "gpt_oss": "GptOssRMSNorm",
    "deepseek_v3": "DeepseekV3RMSNorm",
}
OTHER = {
    "gemma3": "Gemma3RMSNorm",
    "qwen3_next": "Qwen3NextRMSNormGated",
    "qwen3_5": "Qwen3_5RMSNorm",
}


def kind_of(family: str, name: str) -> type[nn.Module]:
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    return getattr(module, name)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("family", "name"), PLAIN.items())
def test_plain_norms_are_found(family: str, name: str) -> None:
    assert is_plain(kind_of(family, name))


@pytest.mark.parametrize(("family", "name"), OTHER.items())
def test_norms_that_do_something_else_are_left(family: str, name: str) -> None:
    assert not is_plain(kind_of(family, name))


class MeanRMSNorm(nn.Module):
    """Looks like a plain one, and subtracts the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.variance_epsilon = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x - x.mean(-1, keepdim=True)
        return self.weight * F.rms_norm(x, (8,), None, self.variance_epsilon)


def test_a_norm_of_another_formula_is_left() -> None:
    assert not is_plain(MeanRMSNorm)
    assert not is_plain(nn.LayerNorm)


def test_on_a_cpu_a_model_computes_what_it_did() -> None:
    norm = kind_of("qwen3", "Qwen3RMSNorm")(16, eps=1e-6)
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = norm(x)
    fuse_norms(norm)
    assert torch.equal(norm(x), expected)


def test_one_kernel_is_nearer_to_float32_than_the_model_itself() -> None:
    """What a GPU computes, here by torch's form for CPUs."""
    generator = torch.Generator().manual_seed(1)
    norm = kind_of("qwen3", "Qwen3RMSNorm")(256, eps=1e-6)
    with torch.no_grad():
        norm.weight.copy_(1 + 0.2 * torch.randn(256, generator=generator))
    x = torch.randn(64, 256, generator=generator).bfloat16()
    norm.bfloat16()
    fused = F.rms_norm(x, (256,), norm.weight, norm.variance_epsilon)
    exact = F.rms_norm(x.float(), (256,), norm.weight.float(), norm.variance_epsilon)
    assert (fused.float() - exact).norm() < (norm(x).float() - exact).norm()
