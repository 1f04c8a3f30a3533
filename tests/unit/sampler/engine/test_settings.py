"""What an engine is started with, and what is refused before it starts."""

from __future__ import annotations

import json
import pickle
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NoReturn

import pytest
from pydantic import BaseModel
from transformers import AutoConfig

from services.common.contract.errors import InvalidRequest
from services.sampler.config import GIB, SamplerConfig
from services.sampler.engine.grammars.core import SECONDS_KEY
from services.sampler.engine.settings import arguments as module
from services.sampler.engine.settings.arguments import checked_args, engine_args, refusals
from services.sampler.engine.settings.checks import check_attention, check_text
from services.sampler.engine.settings.models import adapts, compiles


def config_of(directory: Path, family: str, **settings: object) -> SamplerConfig:
    AutoConfig.for_model(family, num_hidden_layers=2, **settings).save_pretrained(directory)
    return SamplerConfig("sampler-0", "org/model", str(directory), directory, "redis://127.0.0.1/0")


@pytest.mark.parametrize(
    ("settings", "sequences"),
    [
        ({}, 256),
        ({"tensor_parallel_size": 2}, 512),
        ({"max_batched_tokens": 64}, 64),
        ({"max_sequences": 32}, 32),
    ],
)
def test_on_a_cpu_it_generates_as_many_sequences_at_once_as_vllm_by_itself(
    tmp_path: Path, settings: dict[str, int], sequences: int
) -> None:
    config = replace(config_of(tmp_path, "qwen3"), **settings)
    assert engine_args(config, "cpu").max_num_seqs == sequences
    # A GPU's own number is vLLM's to choose.
    assert engine_args(config, "cuda").max_num_seqs == (settings.get("max_sequences") or None)


def test_samplers_that_share_a_machine_take_no_more_together_than_one_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "machine_memory", lambda: 64 * GIB)
    # Keys and values of two contexts are 40 GiB.
    large = {"max_position_embeddings": 40960, "head_dim": 1024, "num_key_value_heads": 32}
    config = config_of(tmp_path, "qwen3", **large)
    for samplers in (1, 4):
        share = engine_args(replace(config, machine_samplers=samplers), "cpu").kv_cache_memory_bytes
        assert share == 16 * GIB // samplers
    given = replace(config, machine_samplers=4, kv_cache_gib=16)
    assert engine_args(given, "cpu").kv_cache_memory_bytes == 16 * GIB


@pytest.mark.parametrize(
    ("workers", "context"),
    [
        # 64 MiB are 256 blocks of 128 tokens of 2 layers x 2 x 4 heads x 32 numbers x 4 bytes. One is vLLM's.
        ({}, 255 * 128),
        ({"tensor_parallel_size": 2}, 511 * 128),
        # Each of 8 workers has one of the 4 heads.
        ({"tensor_parallel_size": 8}, 1023 * 128),
        ({"pipeline_parallel_size": 2}, 511 * 128),
    ],
)
def test_a_context_that_a_worker_has_no_room_for_is_refused_before_vllm_does(
    tmp_path: Path, workers: dict[str, int], context: int
) -> None:
    model = {"max_position_embeddings": 10**6, "head_dim": 32, "num_key_value_heads": 4}
    config = replace(config_of(tmp_path, "qwen3", **model), kv_cache_gib=1 / 16, **workers)
    assert engine_args(replace(config, max_context=context), "cpu").max_model_len == context
    with pytest.raises(ValueError, match=f"lower --max-context to {context}, or raise --kv-cache-gib"):
        engine_args(replace(config, max_context=context + 1), "cpu")


def test_a_context_that_a_family_calls_otherwise_is_read_as_vllm_does(tmp_path: Path) -> None:
    config = replace(config_of(tmp_path, "mpt", max_seq_len=512), kv_cache_gib=1)
    assert engine_args(config, "cpu").max_model_len == 512


def test_of_a_model_that_names_no_context_one_is_asked_for_on_a_cpu(tmp_path: Path) -> None:
    config = config_of(tmp_path, "bloom")
    with pytest.raises(InvalidRequest, match=r"org/model does not say how many tokens .* give --max-context"):
        engine_args(config, "cpu")
    assert engine_args(replace(config, max_context=512), "cpu").max_model_len == 512
    assert engine_args(config, "cuda").max_model_len == -1


def test_a_model_without_attention_is_refused_on_a_cpu(tmp_path: Path) -> None:
    config = replace(config_of(tmp_path, "mamba"), max_context=512, dtype="bfloat16")
    with pytest.raises(InvalidRequest, match=r"keys and values .* no attribute 'num_attention_heads'.* GPU"):
        engine_args(config, "cpu")


@pytest.fixture
def nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Whom a test looked for on the network, which is not there. What is tried again is tried at once."""
    asked: list[Any] = []

    def refused(*address: Any, **_: Any) -> NoReturn:
        asked.append(address)
        raise OSError("no network")

    monkeypatch.setattr(socket, "getaddrinfo", refused)
    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    return asked


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ({"model_type": "unheard_of"}, "model type `unheard_of`"),
        ({"model_type": "unheard_of", "auto_map": {"AutoConfig": "code.Config"}}, "contains custom code"),
        ({"architectures": ["UnheardOfForCausalLM"]}, "Should have a `model_type` key"),
        ("not json", "not a valid JSON file"),
    ],
    ids=["an unknown type", "code of its own", "no type", "no settings"],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_model_of_a_kind_that_nobody_knows_is_refused_with_what_to_do(
    tmp_path: Path, nobody_is_asked: list[Any], written: object, says: str, device: str
) -> None:
    text = written if isinstance(written, str) else json.dumps(written)
    (tmp_path / "config.json").write_text(text)
    config = SamplerConfig("sampler-0", "org/model", str(tmp_path), tmp_path, "redis://127.0.0.1/0")
    with pytest.raises(InvalidRequest) as refused:
        checked_args(config, device)
    told = str(refused.value)
    assert told.startswith("vLLM cannot read what kind of model org/model is: ") and says in told
    assert "mend its config.json, or serve a model whose model_type" in told
    assert "\n" not in told and not nobody_is_asked


def test_a_model_in_a_directory_is_checked_without_a_network(
    tmp_path: Path, nobody_is_asked: list[Any]
) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
    config = config_of(tmp_path, "llama", architectures=["LlamaForCausalLM"], **sizes)
    assert checked_args(replace(config, kv_cache_gib=1), "cpu").model == str(tmp_path)
    assert not nobody_is_asked


def test_linear_attention_in_float32_is_refused_on_a_cpu(tmp_path: Path) -> None:
    layers = {"layer_types": ["linear_attention", "full_attention"]}
    hybrid = config_of(tmp_path, "qwen3_next", **layers)
    with pytest.raises(InvalidRequest, match="--dtype bfloat16"):
        check_attention(hybrid, "cpu")
    check_attention(hybrid, "cuda")
    check_attention(replace(hybrid, dtype="bfloat16"), "cpu")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen2_moe"])
def test_windows_of_some_layers_are_refused_where_vllm_has_one_for_all(
    tmp_path: Path, family: str, device: str
) -> None:
    mixed = {"layer_types": ["sliding_attention", "full_attention"], "max_window_layers": 2}
    windows = {"use_sliding_window": True, "sliding_window": 100, "num_experts": 0}
    with pytest.raises(InvalidRequest, match=r"org/model has a window .* up to 100 tokens"):
        check_attention(config_of(tmp_path, family, **windows, **mixed), device)
    whole = {"layer_types": ["sliding_attention"] * 2}
    check_attention(config_of(tmp_path, family, **windows, **whole), device)


def test_windows_of_a_family_that_has_them_by_layer_are_taken(tmp_path: Path) -> None:
    mixed = {"layer_types": ["sliding_attention", "full_attention"]}
    check_attention(config_of(tmp_path, "gemma3_text", **mixed), "cpu")


def test_latent_attention_on_a_cpu_has_the_sizes_of_its_kernel(tmp_path: Path) -> None:
    check_attention(config_of(tmp_path, "deepseek_v3"), "cpu")
    narrow = config_of(tmp_path, "deepseek_v3", kv_lora_rank=256)
    with pytest.raises(InvalidRequest, match=r"org/model has latent attention with 256 \+ 64 .* use a GPU"):
        check_attention(narrow, "cpu")
    check_attention(narrow, "cuda")


def test_latent_attention_on_a_cpu_is_the_one_of_any_type_of_numbers(tmp_path: Path) -> None:
    config = replace(config_of(tmp_path, "deepseek_v3"), kv_cache_gib=1)
    assert engine_args(config, "cpu").attention_backend == "CPU_MLA"
    assert engine_args(config, "cuda").attention_backend is None


def test_rotations_of_halves_in_latent_attention_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="org/model has rope_interleave false"):
        check_attention(config_of(tmp_path, "deepseek_v3", rope_interleave=False), "cuda")


def test_experts_of_deepseek_are_chosen_as_transformers_does(tmp_path: Path) -> None:
    expected = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    unsaid = replace(config_of(tmp_path, "deepseek_v3"), kv_cache_gib=1)
    assert engine_args(unsaid, "cuda").hf_overrides == expected
    said = replace(unsaid, head_dtype="float32")
    assert engine_args(said, "cuda").hf_overrides == {**expected, "head_dtype": "float32"}
    other = config_of(tmp_path, "deepseek_v3", scoring_func="softmax")
    with pytest.raises(InvalidRequest, match="org/model has scoring_func 'softmax'"):
        engine_args(other, "cuda")
    assert engine_args(config_of(tmp_path, "llama"), "cuda").hf_overrides == {}


def test_of_a_model_that_reads_pictures_too_the_text_model_is_served(tmp_path: Path) -> None:
    config = config_of(tmp_path, "gemma3")
    check_text(config)
    overrides: Any = engine_args(config, "cuda").hf_overrides
    both = AutoConfig.for_model("gemma3")
    both.quantization_config = {"quant_method": "fp8"}
    text = pickle.loads(pickle.dumps(overrides))(both)
    assert (text.model_type, text.architectures) == ("gemma3_text", ["Gemma3ForCausalLM"])
    assert text.quantization_config == {"quant_method": "fp8"}
    config = replace(config, head_dtype="float32")
    overrides = engine_args(config, "cuda").hf_overrides
    assert overrides(AutoConfig.for_model("gemma3")).head_dtype == "float32"


def test_a_model_of_more_than_text_that_nobody_takes_apart_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"org/model \(qwen2_vl\) is not of text alone"):
        check_text(config_of(tmp_path / "both", "qwen2_vl"))
    check_text(config_of(tmp_path / "text", "qwen3_5_text"))


def test_what_vllm_says_against_settings_is_one_sentence(tmp_path: Path) -> None:
    class Settings(BaseModel):
        dtype: Literal["float32"]

    config = config_of(tmp_path, "qwen3")
    with pytest.raises(InvalidRequest) as refused, refusals(config):
        Settings.model_validate({"dtype": "int4"})
    words = "vLLM does not take org/model with these settings: Input should be 'float32'"
    assert str(refused.value) == words
    with pytest.raises(InvalidRequest, match="settings: a context too long"), refusals(config):
        raise ValueError("a context too long")


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


@pytest.mark.parametrize(("rank", "most"), [(256, 32), (128, 64), (8, 1024)])
def test_a_gpu_has_no_more_adapters_than_its_kernel_reaches_in_the_output_head(
    tmp_path: Path, rank: int, most: int
) -> None:
    config = config_of(tmp_path, "qwen3", vocab_size=262_144, architectures=["Qwen3ForCausalLM"])
    many = replace(config, max_lora_rank=rank, max_loras=most + 1, kv_cache_gib=1, max_context=256)
    with pytest.raises(InvalidRequest, match=f"--max-loras is {most + 1}, .* reaches {most} in .* 262144"):
        checked_args(many, "cuda")
    assert checked_args(replace(many, max_loras=most), "cuda").max_loras == most
    assert checked_args(many, "cpu").max_loras == most + 1


def test_adapters_of_quantised_files_take_a_gpu(tmp_path: Path) -> None:
    config = config_of(tmp_path, "qwen3", quantization_config={"quant_method": "compressed-tensors"})
    assert adapts(config, "cuda") and not adapts(config, "cpu")


@pytest.mark.parametrize("files", ["float16", "bfloat16", "float32"])
def test_left_to_itself_a_sampler_computes_in_what_the_trainer_does_whatever_the_files_say(
    tmp_path: Path, files: str
) -> None:
    config = config_of(tmp_path, "qwen3", dtype=files)
    assert (engine_args(config, "cpu").dtype, engine_args(config, "cuda").dtype) == ("float32", "bfloat16")


def test_quantised_files_say_what_a_gpu_computes_in(tmp_path: Path) -> None:
    config = config_of(tmp_path, "qwen3", quantization_config={"quant_method": "awq"})
    assert engine_args(config, "cuda").dtype == "auto"
    assert engine_args(replace(config, dtype="bfloat16"), "cuda").dtype == "bfloat16"


def test_a_context_that_a_gpu_has_no_room_for_is_cut_unless_it_was_asked_for(tmp_path: Path) -> None:
    config = config_of(tmp_path, "qwen3")
    assert engine_args(config, "cuda").max_model_len == -1
    assert engine_args(replace(config, max_context=4096), "cuda").max_model_len == 4096


def test_one_library_makes_all_grammars_whatever_is_asked_for_first(tmp_path: Path) -> None:
    assert engine_args(config_of(tmp_path, "qwen3"), "cuda").structured_outputs_config.backend == "xgrammar"


def test_a_grammar_that_takes_too_long_fails_before_the_engine_counts_as_stuck(tmp_path: Path) -> None:
    config = config_of(tmp_path, "qwen3")
    for stall, seconds in ((300.0, 60.0), (4.0, 2.0)):
        arguments = engine_args(replace(config, stall_seconds=stall), "cuda")
        assert arguments.additional_config[SECONDS_KEY] == seconds


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A C++ compiler, and Python's headers."""
    program = tmp_path / "cxx"
    program.touch(0o755)
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("CXX", str(program))
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    return program


def test_a_gpu_compiles_every_model_and_a_cpu_those_without_adapters(tmp_path: Path, compiler: Path) -> None:
    config = config_of(tmp_path / "model", "qwen3")
    without = replace(config, max_loras=0)
    assert compiles(config, "cuda") and compiles(without, "cuda") and compiles(without, "cpu")
    assert not compiles(config, "cpu")
    for device in ("cpu", "cuda"):
        assert not compiles(replace(without, enforce_eager=True), device)
    assert engine_args(without, "cpu").enforce_eager is False
    assert engine_args(config, "cpu").enforce_eager is True


def test_a_cpu_compiles_no_experts_whose_routers_python_calls_and_no_quantised_weights(
    tmp_path: Path, compiler: Path
) -> None:
    quantised = {"quantization_config": {"quant_method": "compressed-tensors"}}
    for name, family, settings in (("experts", "qwen3_moe", {}), ("quantised", "qwen3", quantised)):
        config = replace(config_of(tmp_path / name, family, **settings), max_loras=0)
        assert not compiles(config, "cpu") and compiles(config, "cuda")


def test_a_cpu_compiles_nothing_where_no_compiler_is_or_no_header_of_python(
    tmp_path: Path, compiler: Path
) -> None:
    config = replace(config_of(tmp_path / "model", "qwen3"), max_loras=0)
    (tmp_path / "Python.h").unlink()
    assert not compiles(config, "cpu")
    (tmp_path / "Python.h").touch()
    compiler.unlink()
    assert not compiles(config, "cpu")
