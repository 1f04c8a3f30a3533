"""Exported weights, read by the libraries they are meant for."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.common.contract.errors import Internal
from services.common.contract.tensors import HostTensor
from services.common.storage.directory import publish_directory
from services.launcher.tiny_model import make_tiny_model
from services.trainer.compute.data import LoraSpec
from services.trainer.compute.lora.targets import head_name
from services.trainer.files.export_format import adapter_files, full_model_files, read_adapter
from services.trainer.files.tensor_files import save_tensors
from tests.unit.trainer.compute.architectures import FLAT, config_of, random_model, with_pictures

SIZES = {
    "vocab": 300,
    "hidden": 16,
    "layers": 1,
    "heads": 2,
    "kv_heads": 1,
    "intermediate": 16,
    "context": 32,
}


def host(tensor: torch.Tensor) -> HostTensor:
    name = str(tensor.dtype).removeprefix("torch.")
    return HostTensor(name, tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).numpy().tobytes())


def changed_weights(directory: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """A model's weights after training, each once."""
    generator = torch.Generator().manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return {
        name: (weight + 0.01 * torch.randn(weight.shape, generator=generator)).to(dtype).detach()
        for name, weight in model.named_parameters()
    }


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_model(directory, **SIZES)
    return directory


def export(base: Path, target: Path, weights: dict[str, torch.Tensor], shard: int = 1 << 30) -> None:
    files = full_model_files(str(base), {name: host(tensor) for name, tensor in weights.items()}, shard)
    publish_directory(target, files, replace=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard", [1 << 30, 8_000])
def test_transformers_loads_what_was_exported(
    base: Path, tmp_path: Path, shard: int, dtype: torch.dtype
) -> None:
    weights = changed_weights(base, dtype)
    export(base, tmp_path / "out", weights, shard)
    sharded = (tmp_path / "out" / "model.safetensors.index.json").exists()
    assert sharded == (shard == 8_000)
    model, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype="auto", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    loaded = dict(model.named_parameters())
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())
    text = "A tinsmith makes things."
    tokenizers = [AutoTokenizer.from_pretrained(path) for path in (base, tmp_path / "out")]
    assert len({tuple(tokenizer.encode(text)) for tokenizer in tokenizers}) == 1


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_5_text"])
def test_of_a_model_that_reads_pictures_too_the_text_model_is_exported(family: str, tmp_path: Path) -> None:
    text = random_model(config_of(family, {**FLAT[family], "vocab_size": 512}), "eager")
    with_pictures(text).save_pretrained(tmp_path / "both")
    weights = {name: weight.detach() for name, weight in text.named_parameters()}
    export(tmp_path / "both", tmp_path / "out", weights)
    found, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert type(found) is type(text) and found.config.architectures == [type(text).__name__]
    tokens = torch.arange(20)[None]
    torch.testing.assert_close(found(tokens).logits, text(tokens).logits, atol=1e-4, rtol=1e-4)


def test_a_model_of_a_quantised_base_is_exported_as_it_is(base: Path, tmp_path: Path) -> None:
    config = json.loads((base / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    export(tmp_path, tmp_path / "out", changed_weights(base))
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize("rank", [4, 48])
def test_peft_adds_the_tensors_of_an_adapter_at_the_trainers_scale(
    base: Path, tmp_path: Path, rank: int
) -> None:
    generator = torch.Generator().manual_seed(5)
    merged = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    # An adapter of the head leaves the embedding alone, also where the base ties the two.
    merged.lm_head.weight = torch.nn.Parameter(merged.lm_head.weight.detach().clone())
    adapter = {}
    for module in ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj", "lm_head"):
        weight = merged.get_submodule(module).weight
        a = 0.1 * torch.randn(rank, weight.shape[1], generator=generator)
        b = 0.1 * torch.randn(weight.shape[0], rank, generator=generator)
        adapter |= {f"{module}.lora_A": host(a), f"{module}.lora_B": host(b)}
        weight.data += b @ a * (32 / rank)
    publish_directory(tmp_path / "out", adapter_files("org/base", LoraSpec(rank), adapter), replace=False)
    assert read_adapter(tmp_path / "out") == adapter
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(plain, str(tmp_path / "out"))
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(adapted(tokens).logits, merged(tokens).logits, atol=1e-5, rtol=1e-5)


def test_peft_adds_the_adapter_of_a_head_that_its_model_calls_otherwise(tmp_path: Path) -> None:
    merged = random_model(config_of("biogpt", {"tie_word_embeddings": False}), "eager")
    plain, head = copy.deepcopy(merged), head_name(merged)
    a, b = torch.randn(4, 32), torch.randn(64, 4)
    merged.get_output_embeddings().weight.data += b @ a * (32 / 4)
    adapter = {"lm_head.lora_A": host(a), "lm_head.lora_B": host(b)}
    publish_directory(tmp_path / "out", adapter_files("org/base", LoraSpec(4), adapter, head), replace=False)
    assert read_adapter(tmp_path / "out", head) == adapter
    adapted, tokens = peft.PeftModel.from_pretrained(plain, str(tmp_path / "out")), torch.arange(1, 20)[None]
    with torch.no_grad():
        torch.testing.assert_close(adapted(tokens).logits, merged(tokens).logits, atol=1e-4, rtol=1e-4)


def tied(base: Path, directory: Path, tie: bool = True) -> Path:
    directory.mkdir()
    for path in base.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    config = json.loads((base / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tie}))
    return directory


def test_a_tied_head_is_written_once(base: Path, tmp_path: Path) -> None:
    weights = changed_weights(base)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    export(tied(base, tmp_path / "base"), tmp_path / "out", weights)
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(model.lm_head.weight, weights["model.embed_tokens.weight"])


def test_a_head_that_is_no_longer_the_embedding_is_kept(base: Path, tmp_path: Path) -> None:
    weights = changed_weights(base)
    weights["lm_head.weight"] = torch.ones_like(weights["model.embed_tokens.weight"])
    export(tied(base, tmp_path / "base"), tmp_path / "out", weights)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(model.lm_head.weight, weights["lm_head.weight"])
    assert torch.equal(model.model.embed_tokens.weight, weights["model.embed_tokens.weight"])


def test_tensors_of_several_element_types_share_a_file(tmp_path: Path) -> None:
    tensors = {
        "a": torch.arange(3, dtype=torch.bfloat16),
        "b": torch.arange(6, dtype=torch.float32).view(2, 3),
        "c": torch.tensor(7, dtype=torch.int64),
        "empty": torch.empty(0, 4),
    }
    save_tensors({name: host(tensor) for name, tensor in tensors.items()})(tmp_path / "x.safetensors")
    loaded = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_a_base_model_that_cannot_be_had_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(Internal, match="nobody/has-this"):
        full_model_files("nobody/has-this", {"a": host(torch.zeros(1))})
