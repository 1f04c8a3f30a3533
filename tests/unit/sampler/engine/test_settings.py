"""What an engine is started with, and what is refused before it starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoConfig

from services.common.contract.errors import InvalidRequest
from services.sampler.config import SamplerConfig
from services.sampler.engine.settings import adapts, check_attention


def config_of(directory: Path, family: str, **settings: object) -> SamplerConfig:
    AutoConfig.for_model(family, num_hidden_layers=2, **settings).save_pretrained(directory)
    return SamplerConfig("sampler-0", "org/model", str(directory), directory, "redis://127.0.0.1/0")


def test_linear_attention_in_float32_is_refused_on_a_cpu(tmp_path: Path) -> None:
    layers = {"layer_types": ["linear_attention", "full_attention"]}
    hybrid = config_of(tmp_path, "qwen3_next", **layers)
    with pytest.raises(InvalidRequest, match="--dtype bfloat16"):
        check_attention(hybrid, "cpu")
    check_attention(hybrid, "cuda")
    check_attention(replace(hybrid, dtype="bfloat16"), "cpu")


def test_full_attention_is_computed_in_any_type(tmp_path: Path) -> None:
    check_attention(config_of(tmp_path, "qwen3"), "cpu")


@pytest.mark.parametrize(("family", "on_cpu"), [("qwen3", True), ("qwen3_moe", False), ("gpt_oss", False)])
def test_adapters_of_a_model_with_routed_experts_take_a_gpu(
    tmp_path: Path, family: str, on_cpu: bool
) -> None:
    config = config_of(tmp_path, family)
    assert adapts(config, "cpu") == on_cpu
    assert adapts(config, "cuda")
    assert not adapts(replace(config, max_loras=0), "cuda")


def test_adapters_of_quantised_files_take_a_gpu(tmp_path: Path) -> None:
    config = config_of(tmp_path, "qwen3", quantization_config={"quant_method": "compressed-tensors"})
    assert adapts(config, "cuda") and not adapts(config, "cpu")
