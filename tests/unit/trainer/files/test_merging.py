"""The cookbook merges an exported adapter into its base as PEFT adds it, with the base's head tied or not."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from tinker_cookbook import weights
from tinker_cookbook.exceptions import WeightsMergeError
from transformers import AutoModelForCausalLM, PreTrainedModel

from services.common.contract.tensors import HostTensor
from services.common.storage.directory import publish_directory
from services.launcher.tiny_model import make_tiny_model
from services.trainer.compute.data import LoraSpec
from services.trainer.files.export_format import adapter_files

RANK = 4
LAYER = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj")


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base whose head is its embedding."""
    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_model(
        directory, vocab=300, hidden=16, layers=1, heads=2, kv_heads=1, intermediate=16, context=32
    )
    model = load(directory)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(directory)
    return directory


def load(directory: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def untied(tied: Path, directory: Path) -> Path:
    """The same base with a head of its own, as docs/inference.md says how to make it."""
    model = load(tied)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.save_pretrained(directory)
    return directory


def adapter(base: Path, directory: Path, *modules: str) -> Path:
    generator, model, tensors = torch.Generator().manual_seed(7), load(base), {}
    for module in modules:
        rows, columns = model.get_submodule(module).weight.shape
        for name, shape in (("lora_A", (RANK, columns)), ("lora_B", (rows, RANK))):
            drawn = 0.1 * torch.randn(shape, generator=generator)
            tensors[f"{module}.{name}"] = HostTensor("float32", shape, drawn.numpy().tobytes())
    publish_directory(directory, adapter_files("org/base", LoraSpec(RANK), tensors), replace=False)
    return directory


def merged(base: Path, adapter: Path, directory: Path) -> PreTrainedModel:
    weights.build_hf_model(base_model=str(base), adapter_path=str(adapter), output_path=str(directory))
    return load(directory)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(20)[None]).logits


@pytest.mark.parametrize(("tie", "modules"), [(True, LAYER), (False, LAYER), (False, (*LAYER, "lm_head"))])
def test_what_the_cookbook_merges_computes_as_peft_does(
    tied: Path, tmp_path: Path, tie: bool, modules: tuple[str, ...]
) -> None:
    base = tied if tie else untied(tied, tmp_path / "base")
    given = adapter(base, tmp_path / "adapter", *modules)
    by_peft = logits(peft.PeftModel.from_pretrained(load(base), str(given)))
    assert not torch.allclose(by_peft, logits(load(base)), atol=1e-3)
    torch.testing.assert_close(logits(merged(base, given, tmp_path / "out")), by_peft, atol=1e-5, rtol=1e-5)


def test_an_adapter_of_a_tied_head_is_merged_into_the_base_with_a_head_of_its_own(
    tied: Path, tmp_path: Path
) -> None:
    given = adapter(tied, tmp_path / "adapter", *LAYER, "lm_head")
    # One matrix cannot be both the changed head and the unchanged embedding, and the cookbook says so.
    with pytest.raises(WeightsMergeError, match=r"lm_head\.weight"):
        merged(tied, given, tmp_path / "refused")
    by_peft = logits(peft.PeftModel.from_pretrained(load(tied), str(given)))
    model = merged(untied(tied, tmp_path / "base"), given, tmp_path / "out")
    torch.testing.assert_close(logits(model), by_peft, atol=1e-5, rtol=1e-5)
