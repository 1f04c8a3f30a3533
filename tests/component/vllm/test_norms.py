"""Norms on a CPU, beside vLLM's own way of computing them."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
from vllm import ir
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.platforms import current_platform

from services.sampler.worker.cpu import norms

pytestmark = pytest.mark.heavy

EAGER = CompilationConfig(custom_ops=["all"])
"""As an engine has it that compiles nothing."""
NUMBERS = torch.randn(5, 8 * 64, generator=torch.Generator().manual_seed(1))


class Normed(NamedTuple):
    """What a norm came to, and vLLM's own way. `kernels`: of vLLM's for CPUs that were called."""

    found: list[torch.Tensor]
    expected: list[torch.Tensor]
    kernels: list[str]


def normed(monkeypatch: pytest.MonkeyPatch, *given: torch.Tensor, **made: Any) -> Normed:
    """Numbers, with a residual or without, normed as vLLM's layer of their size does on a CPU."""
    # Of vLLM again afterwards.
    monkeypatch.setattr(RMSNorm, "forward_cpu", RMSNorm.forward_cpu)
    norms.apply()
    with set_current_vllm_config(VllmConfig(compilation_config=EAGER)):
        norm = RMSNorm(given[0].shape[-1], **{"dtype": torch.float32, **made})
    norm.weight.data.uniform_(0.5, 2.0, generator=torch.Generator().manual_seed(2))
    expected = norm.forward_native(*(each.clone() for each in given))
    kernels = {name: Mock(wraps=getattr(torch.ops._C, name)) for name in ("rms_norm", "fused_add_rms_norm")}
    for name, kernel in kernels.items():
        monkeypatch.setattr(torch.ops._C, name, kernel)
    found, own = (list(each) if isinstance(each, tuple) else [each] for each in (norm(*given), expected))
    return Normed(found, own, [name for name, kernel in kernels.items() if kernel.called])


def test_norms_come_to_what_vllms_own_way_comes_to(monkeypatch: pytest.MonkeyPatch) -> None:
    made = normed(monkeypatch, NUMBERS)
    torch.testing.assert_close(made.found, made.expected)
    assert made.kernels == ["rms_norm"]


def test_norms_of_heads_are_of_each_head(monkeypatch: pytest.MonkeyPatch) -> None:
    queries = NUMBERS[:, : 4 * 64].unflatten(1, (4, 64))
    assert not queries.is_contiguous()
    made = normed(monkeypatch, queries)
    torch.testing.assert_close(made.found, made.expected)
    assert made.kernels == ["rms_norm"]


def test_norms_of_a_sum_tell_the_sum_too(monkeypatch: pytest.MonkeyPatch) -> None:
    made = normed(monkeypatch, NUMBERS.clone(), NUMBERS.flip(0))
    torch.testing.assert_close(made.found, made.expected)
    assert made.kernels == ["fused_add_rms_norm"]


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ([NUMBERS.bfloat16()], {}),
        ([NUMBERS], {"var_hidden_size": 64}),
        ([NUMBERS], {"has_weight": False}),
        ([NUMBERS[:, ::2], NUMBERS[:, 1::2]], {}),
        ([NUMBERS, NUMBERS.T.contiguous().T], {}),
        ([NUMBERS, NUMBERS.bfloat16()], {}),
        ([NUMBERS[:, :12].contiguous()], {}),
        ([NUMBERS[:, :12].contiguous(), NUMBERS[:, 12:24].contiguous()], {}),
        ([NUMBERS], {"dtype": torch.bfloat16}),
    ],
    ids=[
        "bfloat16",
        "part of the variance",
        "no weight",
        "a sum of numbers apart",
        "a residual apart",
        "a residual in bfloat16",
        "no whole vectors",
        "a sum of no whole vectors",
        "a weight in bfloat16",
    ],
)
def test_norms_of_other_kinds_go_vllms_own_way(
    monkeypatch: pytest.MonkeyPatch, given: list[torch.Tensor], made: dict[str, Any]
) -> None:
    own = normed(monkeypatch, *given, **made)
    assert all(torch.equal(*pair) for pair in zip(own.found, own.expected, strict=True))
    assert own.kernels == []


def test_vllm_itself_uses_its_kernels_of_norms_on_no_cpu() -> None:
    current_platform.import_ir_kernels()
    assert not ir.ops.rms_norm.impls["vllm_c"].supported
    assert not ir.ops.fused_add_rms_norm.impls["vllm_c"].supported
    assert "def forward_cpu" not in inspect.getsource(RMSNorm)


def test_a_worker_has_them_in_place_before_it_makes_a_model() -> None:
    code = (
        "import services.sampler.worker.extension\n"
        "from services.sampler.worker.cpu import norms\n"
        "from vllm.model_executor.layers.layernorm import RMSNorm\n"
        "assert RMSNorm.forward_cpu is norms._forward"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
