"""The models that are measured, without their weights, and what a pass over them has to compute.

FLOPs are counted as PaLM does for its model FLOPs utilization (Chowdhery et al. 2022, appendix B), less what
a frozen base model has not: 2 a weight and token forward, 2 backward for what goes into a linear, and 2 more
for its weights, which only adapters have. Causal attention counts half of the square. What checkpointing
computes again counts nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RANK = 32


@dataclass(frozen=True)
class Shape:
    """A Qwen3 of these sizes."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool

    @property
    def config(self) -> dict[str, Any]:
        """As transformers' Qwen3Config takes it; the rest is as published with Qwen3."""
        return {
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": 40_960,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        }

    @property
    def linears(self) -> list[tuple[int, int]]:
        """Features into and out of every linear, the output head's last."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        block = [
            (self.hidden, query),
            *[(self.hidden, key)] * 2,
            (query, self.hidden),
            *[(self.hidden, self.intermediate)] * 2,
            (self.intermediate, self.hidden),
        ]
        return [*block * self.layers, (self.hidden, self.vocab)]

    def flops(self, lengths: Sequence[int], rank: int = RANK) -> float:
        """Of a forward and backward pass over sequences of these lengths, with an adapter on every linear."""
        base = sum(into * out for into, out in self.linears)
        adapter = sum(rank * (into + out) for into, out in self.linears)
        attention = 6 * self.layers * self.heads * self.head_dim
        return sum(
            length * (4 * base + 6 * adapter) + attention * length**2 for length in map(float, lengths)
        )


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("tiny", 64, 2, 4, 2, 16, 128, 512, True),
        Shape("Qwen3-0.6B", 1024, 28, 16, 8, 128, 3072, 151_936, True),
        Shape("Qwen3-8B", 4096, 36, 32, 8, 128, 12_288, 151_936, False),
    )
}


@dataclass(frozen=True)
class Grid:
    """What is measured: each of the shapes, with each of these numbers of tokens and of adapters."""

    shapes: tuple[str, ...]
    tokens: tuple[int, ...]
    adapters: tuple[int, ...]


GRIDS = {
    "tiny": Grid(("tiny",), (64, 256), (1, 4)),
    "qwen3": Grid(("Qwen3-0.6B", "Qwen3-8B"), (1024, 8192, 32_768), (1, 8, 64)),
}
LONGEST = 8192
"""Tokens of a sequence, at most."""
GROUPS = (
    {"prompts": 1, "prompt": 512, "answers": 16, "answer": 64},
    {"prompts": 32, "prompt": 64, "answers": 4, "answer": 64},
)
"""Answers to prompts, by their numbers and tokens: one group as RL has them, and many small ones."""


def lengths(tokens: int, adapters: int) -> list[int]:
    """Equal sequences that are so many tokens together: as few as `LONGEST` allows, one of each adapter at
    least."""
    count = max(adapters, -(-tokens // LONGEST))
    return [tokens // count] * count


def write_without_weights(shape: Shape, dtype: str, directory: Path) -> Path:
    """A model's directory that loads as any other, and whose weights are all zero.

    The file of weights has a header and a hole: it takes no room on the disk and no time to write.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    directory.mkdir(parents=True)
    config = AutoConfig.for_model("qwen3", **shape.config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)
    item, kind = {"float32": (4, "F32"), "bfloat16": (2, "BF16")}[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in model.state_dict().items():
        if shape.tied and name == "lm_head.weight":
            continue
        start, end = end, end + item * math.prod(tensor.shape)
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return directory


def fill(model: Any, seed: int = 0) -> None:
    """Gives a model on its device random weights: those of norms are one, the others as of a fresh Qwen3."""
    import torch

    parameters = list(model.parameters())
    generator = torch.Generator(parameters[0].device).manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters:
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.fill_(1.0)
