"""Weights in the formats of the Hugging Face libraries: a PEFT adapter, or a whole model's directory.

Invariant: what is written loads with PEFT, transformers and vLLM as it is and computes what the trainer
computes: the adapter's tensors are the trained ones, with lora_alpha / r as their scale, and a whole model
names its weights as its base does, each once. Adapters of routed experts alone have another layout, Tinker's
(trainer/compute/lora/experts.py).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

from services.common.contract.adapters import LORA_ALPHA
from services.common.contract.errors import Internal
from services.common.contract.tensors import HostTensor
from services.common.storage import hub
from services.common.storage.base import Writer
from services.trainer.compute.data import LoraSpec
from services.trainer.compute.lora.adapter import HEAD
from services.trainer.compute.model_files.text_model import text_model
from services.trainer.files.base import Base
from services.trainer.files.tensor_files import load_tensors, save_tensors, save_text

ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
MODEL_WEIGHTS, MODEL_INDEX, MODEL_CONFIG = (
    "model.safetensors",
    "model.safetensors.index.json",
    "config.json",
)
MAX_SHARD_BYTES = 4 * 1024**3

_PREFIX = "base_model.model."
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# Everything that transformers and vLLM read of a model's directory beside config and weights.
_COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def weight_files(base: Base, lora: LoraSpec | None, tensors: Mapping[str, HostTensor]) -> dict[str, Writer]:
    """The files of an adapter, or without `lora` of a model all of whose weights are given. Blocking.

    Raises:
        Internal: as `full_model_files`.
    """
    if lora is None:
        return full_model_files(base.path, tensors)
    return adapter_files(base.portable_name, lora, tensors, base.head)


def adapter_files(
    base_model: str, lora: LoraSpec, adapter: Mapping[str, HostTensor], head: str = HEAD
) -> dict[str, Writer]:
    """The files of a PEFT adapter.

    Args:
        base_model: name of the model it adapts.
        adapter: `<module>.lora_A` [rank, in] and `<module>.lora_B` [out, rank], of routed experts with their
            number, or 1, before; float32 on the host.
        head: what the model calls its output head.
    """
    adapter = _renamed(adapter, HEAD, head)
    modules = {name.rpartition(".")[0] for name in adapter}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": lora.rank,
        "lora_alpha": LORA_ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted({module.rpartition(".")[2] for module in modules}),
    }
    return {
        ADAPTER_WEIGHTS: save_tensors({f"{_PREFIX}{name}.weight": array for name, array in adapter.items()}),
        ADAPTER_CONFIG: _save_json(config),
    }


def read_adapter(directory: Path, head: str = HEAD) -> dict[str, HostTensor]:
    """Tensors of a directory with the files of `adapter_files`, by their adapter names. Blocking.

    Args:
        head: as of `adapter_files`.

    Raises:
        FileNotFoundError: there is no such file.
        DataLoss: it is damaged.
    """
    stored = load_tensors(directory / ADAPTER_WEIGHTS)
    named = {name.removeprefix(_PREFIX).removesuffix(".weight"): array for name, array in stored.items()}
    return _renamed(named, head, HEAD)


def _renamed(adapter: Mapping[str, HostTensor], old: str, new: str) -> dict[str, HostTensor]:
    """With another name of one module."""
    return {
        f"{new}.{part}" if module == old else f"{module}.{part}": array
        for name, array in adapter.items()
        for module, _, part in (name.rpartition("."),)
    }


def full_model_files(
    model_path: str, weights: Mapping[str, HostTensor], max_shard_bytes: int = MAX_SHARD_BYTES
) -> dict[str, Writer]:
    """The files of a model's directory: weights, configuration, tokenizer. Blocking.

    Args:
        model_path: directory or hub id of the base model, whose configuration and tokenizer are taken.
        weights: by the names of the base model's own files, all of one element type. A head that is tied
            to the embedding may be there or not.
        max_shard_bytes: larger models are cut into files of at most this size, or of one tensor.

    Raises:
        Internal: the base model's files cannot be found.
    """
    source = base_directory(model_path)
    config, weights = _configuration(source), dict(weights)
    if config.get("tie_word_embeddings") and _HEAD in weights:
        if weights[_HEAD] == weights.get(_EMBEDDING):
            del weights[_HEAD]
        else:
            config["tie_word_embeddings"] = False
    config.pop("torch_dtype", None)
    config["dtype"] = next(iter(weights.values())).dtype
    files: dict[str, Writer] = {MODEL_CONFIG: _save_json(config)}
    files |= {name: _copy(source / name) for name in _COPIED if (source / name).is_file()}
    return files | _weight_files(weights, max_shard_bytes)


def base_directory(model_path: str) -> Path:
    """Directory with a model's configuration and tokenizer. Blocking; may download small files.

    Raises:
        Internal: it is neither a directory nor a repository that can be had.
    """
    if Path(model_path).is_dir():
        return Path(model_path)
    if here := hub.kept(model_path):
        return here
    wanted = [MODEL_CONFIG, *_COPIED]
    try:
        return Path(huggingface_hub.snapshot_download(model_path, allow_patterns=wanted))
    except (OSError, ValueError, LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise Internal(f"the configuration of {model_path} cannot be had: {error}") from error


def _configuration(source: Path) -> dict[str, Any]:
    """That of a model in a directory, of one that reads pictures too that of the text model in it; whose
    weights are as they are, although those of the directory may be quantised."""
    config: dict[str, Any] = json.loads((source / MODEL_CONFIG).read_text())
    config.pop("quantization_config", None)
    if "text_config" not in config:
        return config
    text = text_model(str(source))
    found: dict[str, Any] = json.loads(text.config.to_json_string(use_diff=False))
    found.pop("quantization_config", None)
    return {**found, "architectures": [text.kind.__name__]}


def _weight_files(weights: Mapping[str, HostTensor], max_shard_bytes: int) -> dict[str, Writer]:
    shards: list[dict[str, HostTensor]] = [{}]
    size = 0
    for name, array in weights.items():
        if shards[-1] and size + len(array.data) > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = array
        size += len(array.data)
    if len(shards) == 1:
        return {MODEL_WEIGHTS: save_tensors(shards[0])}
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    index = {
        "metadata": {"total_size": sum(len(array.data) for array in weights.values())},
        "weight_map": {tensor: file for file, shard in zip(names, shards, strict=True) for tensor in shard},
    }
    files = {file: save_tensors(shard) for file, shard in zip(names, shards, strict=True)}
    return files | {MODEL_INDEX: _save_json(index)}


def _save_json(value: Mapping[str, Any]) -> Writer:
    return save_text(json.dumps(value, indent=2) + "\n")


def _copy(source: Path) -> Writer:
    return lambda path: shutil.copyfile(source, path)
