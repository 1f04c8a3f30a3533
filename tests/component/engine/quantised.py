"""Tiny models whose files are quantised, as published ones are, and the weights that they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.unit.trainer.compute.architectures import FLAT, config_of, random_model

_BLOCK, _GROUP = 24, 32
"""Blocks by which no size divides: of DeepSeek's models some are cut off, too."""
_FP4 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])

Quantised = tuple[dict[str, Tensor], Tensor]
"""What files have of a weight, by what their names end with; and what that stands for, float32."""


def _fp8(name: str, weight: Tensor) -> Quantised | None:
    """Blocks of e4m3 with a float32 scale each."""
    if not name.endswith("proj.weight"):
        return None
    rows, columns = (-(-size // _BLOCK) for size in weight.shape)
    scales = 0.001 + 0.002 * torch.rand(rows, columns, generator=torch.Generator().manual_seed(rows))
    spread = scales.repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)
    spread = spread[: weight.shape[0], : weight.shape[1]]
    held = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"": held, "_scale_inv": scales}, held.float() * spread


def _mxfp4(name: str, weight: Tensor) -> Quantised | None:
    """Groups of 32 numbers of 4 bits, two to a byte, the first in its low half, with a power of two each."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return None
    experts, inner, outer = weight.shape
    generator = torch.Generator().manual_seed(inner)
    shape = (experts, outer, inner // _GROUP)
    codes = torch.randint(0, 16, (*shape, _GROUP), generator=generator, dtype=torch.uint8)
    powers = torch.randint(119, 126, shape, generator=generator, dtype=torch.uint8)
    values = torch.where(codes < 8, 1.0, -1.0) * _FP4[(codes % 8).long()]
    stands_for = (values * 2.0 ** (powers.float() - 127)[..., None]).flatten(2).transpose(1, 2)
    return {"_blocks": codes[..., ::2] | codes[..., 1::2] << 4, "_scales": powers}, stands_for


def unnamed(directory: Path) -> None:
    """Has files say nothing of how they are quantised."""
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]
    (directory / "config.json").write_text(json.dumps(config))


def rescaled(directory: Path, end: str) -> None:
    """Has files call the scales of their weights otherwise."""
    files = load_file(directory / "model.safetensors")
    renamed = {name.replace("weight_scale_inv", f"weight{end}"): each for name, each in files.items()}
    assert renamed.keys() != files.keys()
    save_file(renamed, directory / "model.safetensors", {"format": "pt"})


KINDS: dict[str, tuple[str, Callable[[str, Tensor], Quantised | None], dict[str, Any]]] = {
    "fp8": ("qwen3", _fp8, {"activation_scheme": "dynamic", "weight_block_size": [_BLOCK, _BLOCK]}),
    "mxfp4": ("gpt_oss", _mxfp4, {"modules_to_not_convert": ["model.embed_tokens", "lm_head"]}),
}
"""By name the family of such a model, how a weight is quantised (None: it is not), and what files say."""


def make(kind: str, directory: Path) -> dict[str, Tensor]:
    """Writes a model; its weights by their names."""
    family, quantise, says = KINDS[kind]
    random_model(config_of(family, {**FLAT[family], "intermediate_size": 64}), "eager").save_pretrained(
        directory
    )
    files, weights = dict[str, Tensor](), dict[str, Tensor]()
    for name, weight in load_file(directory / "model.safetensors").items():
        found = quantise(name, weight)
        files |= {name: weight} if found is None else {name + end: each for end, each in found[0].items()}
        weights[name] = weight if found is None else found[1]
    assert files.keys() != weights.keys()
    save_file(
        {name: each.contiguous() for name, each in files.items()},
        directory / "model.safetensors",
        {"format": "pt"},
    )
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": kind, **says}
    (directory / "config.json").write_text(json.dumps(config))
    return weights
