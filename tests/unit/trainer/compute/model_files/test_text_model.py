"""Which model of a directory is trained, and what is refused before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from services.common.contract.errors import InvalidRequest
from services.trainer.compute.model_files.text_model import text_model


def written(directory: Path, says: dict[str, Any]) -> str:
    (directory / "config.json").write_text(json.dumps(says))
    return str(directory)


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("llama", "LlamaForCausalLM"),
        ("gemma3", "Gemma3ForCausalLM"),
        ("qwen3_5_moe", "Qwen3_5MoeForCausalLM"),
    ],
)
def test_it_is_a_model_of_text_alone(model_type: str, name: str, tmp_path: Path) -> None:
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    found = text_model(str(tmp_path))
    assert found.kind.__name__ == name and type(found.config) is found.kind.config_class
    assert (found.names is None) == (model_type == "llama")


@pytest.mark.parametrize(
    ("says", "words"),
    [
        ({"model_type": "vit"}, "no causal language model of the kind vit"),
        ({"model_type": "unheard_of"}, "cannot read what kind of model it is.*unheard_of"),
        ({"architectures": ["Unheard"]}, "cannot read what kind of model it is.*model_type"),
        (
            {"model_type": "unheard_of", "auto_map": {"AutoConfig": "code.Config"}},
            "code that comes with a model is not run",
        ),
        (
            {"model_type": "qwen3", "num_hidden_layers": 2, "layer_types": ["full_attention"]},
            "num_hidden_layers",
        ),
        ({"model_type": "qwen3", "quantization_config": {"quant_method": "gptq"}}, "quantised .gptq."),
        ({"model_type": "bloom"}, "how many tokens the model takes"),
        ({"model_type": "xlnet"}, "how many tokens the model takes"),
        ({"model_type": "rwkv"}, "kind rwkv has no num_attention_heads"),
        ({"model_type": "blt"}, "kind blt has no hidden_size"),
    ],
    ids=[
        "pictures",
        "an unknown type",
        "no type",
        "code of its own",
        "a contradiction",
        "quantised",
        "no end",
        "an end that is none",
        "no attention",
        "no width",
    ],
)
def test_what_cannot_be_trained_is_refused_with_what_to_do(
    says: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequest, match=f"(?s)^{tmp_path}: .*{words}"):
        text_model(written(tmp_path, says))
