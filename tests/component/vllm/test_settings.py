"""What vLLM can do with a model is asked of vLLM before it starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from services.common.contract.errors import InvalidRequest
from services.sampler.config import Quantization, SamplerConfig
from services.sampler.engine.experts import models
from services.sampler.engine.settings.arguments import engine_args
from services.sampler.engine.settings.checks import check_model
from tests.unit.sampler.engine.test_settings import config_of


def checked(config: SamplerConfig) -> None:
    check_model(config, engine_args(config, "cuda"))


def test_what_a_model_has_too_few_layers_for_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path, "qwen3", architectures=["Qwen3ForCausalLM"])
    checked(replace(config, pipeline_parallel_size=2))
    with pytest.raises(InvalidRequest, match="--pipeline-parallel-size is 3, and org/model has 2 layers"):
        checked(replace(config, pipeline_parallel_size=3))


def test_a_model_that_vllm_runs_in_one_stage_only_is_refused_in_several(tmp_path: Path) -> None:
    config = config_of(tmp_path, "whisper", architectures=["WhisperForConditionalGeneration"])
    with pytest.raises(InvalidRequest, match="runs WhisperForConditionalGeneration in one stage only"):
        checked(replace(config, pipeline_parallel_size=2))


def test_files_that_are_quantised_are_not_quantised_once_more(tmp_path: Path) -> None:
    described = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    config = config_of(tmp_path, "qwen3", architectures=["Qwen3ForCausalLM"], quantization_config=described)
    with pytest.raises(InvalidRequest, match="quantised already: leave out --quantization fp8_per_tensor"):
        checked(replace(config, quantization="fp8_per_tensor"))
    with pytest.raises(InvalidRequest, match=r"org/model so: torch.float32 .*; give --dtype bfloat16"):
        checked(replace(config, dtype="float32"))
    checked(replace(config, dtype="bfloat16"))


def test_a_model_is_quantised_as_the_flag_says_or_as_its_files_are(tmp_path: Path) -> None:
    config = config_of(tmp_path, "qwen3", architectures=["Qwen3ForCausalLM"])
    assert engine_args(config, "cuda").quantization is None
    for word in get_args(Quantization)[1:]:
        arguments = engine_args(replace(config, quantization=word, dtype="bfloat16"), "cuda")
        # What vLLM calls it, and knows how to make of a model's weights.
        assert arguments.create_model_config().quantization == word
        assert arguments.quantization_config is not None and arguments.quantization_config.linear is not None


def test_experts_are_told_of_models_that_have_some_and_that_keep_all_keys_and_values(tmp_path: Path) -> None:
    plain = config_of(tmp_path / "plain", "qwen3", architectures=["Qwen3ForCausalLM"])
    with pytest.raises(
        InvalidRequest, match="with routed experts, and Qwen3ForCausalLM has none; leave it out"
    ):
        checked(replace(plain, routed_experts=True))
    routing = config_of(tmp_path / "routing", "qwen3_moe", architectures=["Qwen3MoeForCausalLM"])
    checked(replace(routing, routed_experts=True))
    assert engine_args(replace(routing, routed_experts=True), "cuda").enable_return_routed_experts
    assert not engine_args(routing, "cuda").enable_return_routed_experts
    windows = {"use_sliding_window": True, "sliding_window": 100, "layer_types": ["sliding_attention"] * 2}
    narrow = config_of(tmp_path / "narrow", "qwen2_moe", architectures=["Qwen2MoeForCausalLM"], **windows)
    with pytest.raises(
        InvalidRequest,
        match=r"all layers of org/model have windows, .* --max-context 100, .* leave --routed-experts out",
    ):
        checked(replace(narrow, routed_experts=True))
    with pytest.raises(InvalidRequest, match="all layers of org/model have windows"):
        checked(replace(narrow, routed_experts=True, max_context=101))
    # The window drops nothing.
    checked(replace(narrow, routed_experts=True, max_context=100))
    # V1 on a CPU hands them over with each step.
    told = replace(narrow, routed_experts=True, kv_cache_gib=1)
    check_model(told, engine_args(told, "cpu"))


@pytest.mark.parametrize(
    ("layers", "window", "refused"),
    [
        (["compressed_attention", "sliding_attention"], 100, True),
        (["compressed_attention", "full_attention"], 100, False),
        (["linear_attention", "attention"], None, False),
    ],
)
def test_experts_are_not_told_where_layers_keep_keys_and_values_in_ways_of_their_own(
    layers: list[str], window: int | None, refused: bool, tmp_path: Path
) -> None:
    config = config_of(tmp_path, "qwen3_moe", architectures=["Qwen3MoeForCausalLM"])
    model: Any = SimpleNamespace(
        architectures=["OtherForCausalLM"],
        is_moe=True,
        get_num_experts_per_tok=lambda: 2,
        is_attention_free=False,
        max_model_len=1000,
        hf_text_config=SimpleNamespace(layer_types=layers, sliding_window=window),
    )
    if not refused:
        models.check(config, model, noted=True)
        return
    with pytest.raises(InvalidRequest, match=r"layers of org/model attend by compressed_attention, .* out"):
        models.check(config, model, noted=True)


def test_experts_are_not_told_of_a_model_without_keys_and_values(tmp_path: Path) -> None:
    config = config_of(tmp_path, "qwen3_moe", architectures=["Qwen3MoeForCausalLM"])
    model: Any = SimpleNamespace(
        architectures=["RecurrentForCausalLM"],
        is_moe=True,
        get_num_experts_per_tok=lambda: 2,
        is_attention_free=True,
    )
    with pytest.raises(
        InvalidRequest, match=r"with attention, .* RecurrentForCausalLM has none; leave it out"
    ):
        models.check(config, model, noted=True)
    models.check(config, model, noted=False)


def test_vllm_still_returns_routed_experts_from_its_v2_runner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it does not, services/sampler/worker/v1/routed_experts.py need not note them itself."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    config = config_of(tmp_path, "qwen3_moe", architectures=["Qwen3MoeForCausalLM"])
    arguments = engine_args(replace(config, max_loras=0), "cpu")
    arguments.create_engine_config()
    asking = replace(arguments, enable_return_routed_experts=True)
    with pytest.raises(ValueError, match="requires Model Runner V2"):
        asking.create_engine_config()
