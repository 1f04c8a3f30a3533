"""What an adapter is made of, and where its matrices lie in one flat tensor.

Invariant: its initial values depend on its seed, or else its model's id, and on nothing else.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from services.common.contract import roles
from services.common.contract.adapters import LORA_ALPHA
from services.common.contract.errors import InvalidRequest
from services.trainer.compute.data import LoraSpec

HEAD = "lm_head"
VALUE_HEAD = "value_head.weight"
ATTENTION_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class LinearShape:
    """Features of an adaptable linear."""

    in_features: int
    out_features: int


def select_targets(linears: Mapping[str, LinearShape], spec: LoraSpec) -> dict[str, LinearShape]:
    """The linears an adapter of `spec` adapts, in the base model's order.

    Args:
        linears: every adaptable linear of the base model by name.

    Raises:
        InvalidRequest: no target is chosen, the base model has no linear of a chosen kind, or a critic's
            value head would not be trained.
    """
    if not 1 <= spec.rank <= 256:
        raise InvalidRequest(f"lora rank must be from 1 to 256, got {spec.rank}")
    roles.check_trains_head(spec.role, spec.train_unembed)
    kinds = {
        "train_attn": (spec.train_attn, ATTENTION_PROJECTIONS),
        "train_mlp": (spec.train_mlp, MLP_PROJECTIONS),
        "train_unembed": (spec.train_unembed, (HEAD,)),
    }
    if not any(chosen for chosen, _ in kinds.values()):
        raise InvalidRequest("the adapter would train nothing; set train_attn, train_mlp or train_unembed")
    if spec.role == "critic":
        # Its head is the value head; the vocabulary's is no part of the model.
        del kinds["train_unembed"]
    wanted: set[str] = set()
    for flag, (chosen, leaves) in kinds.items():
        names = {name for name in linears if name.rpartition(".")[2] in leaves}
        if chosen and not names:
            raise InvalidRequest(f"the base model has nothing that {flag} could adapt; set {flag} to false")
        if chosen:
            wanted |= names
    return {name: shape for name, shape in linears.items() if name in wanted}


class Adapter:
    """One model's adapter: all A and B, and a critic's value head, in one flat float32 tensor on the device.

    Attributes:
        spec: how it was made.
        flat: the masters, one after the other.
        low: what passes compute with: the masters, or a copy of them in the base model's element type, which
            whoever changes the masters renews.
        layout: name ("<module>.lora_A", "<module>.lora_B", `VALUE_HEAD`) -> (offset, shape) into a flat
            tensor.
    """

    def __init__(
        self,
        spec: LoraSpec,
        targets: Mapping[str, LinearShape],
        model_id: str,
        device: str,
        hidden_size: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.spec = spec
        self.scale = LORA_ALPHA / spec.rank
        self.targets = dict(targets)
        self.layout, size = layout_of(targets, spec.rank, hidden_size if spec.role == "critic" else 0)
        flat = torch.zeros(size, dtype=torch.float32)
        seed = spec.seed if spec.seed is not None else _hashed("model", model_id)
        views = self.views(flat)
        for name, shape in targets.items():
            generator = torch.Generator().manual_seed(_hashed(str(seed), name))
            # Kaiming uniform with a = sqrt(5).
            bound = 1 / math.sqrt(shape.in_features)
            views[f"{name}.lora_A"].uniform_(-bound, bound, generator=generator)
        self.flat = flat.to(device)
        self.low = self.flat.to(dtype)

    @property
    def value_head(self) -> int:
        """Elements of the value head: 0 of a policy, the hidden width of a critic."""
        return self.layout[VALUE_HEAD][1][1] if VALUE_HEAD in self.layout else 0

    def renew(self) -> None:
        """The masters changed."""
        if self.low is not self.flat:
            self.low.copy_(self.flat)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """`flat` cut into the adapter's named matrices, sharing storage."""
        return {name: matrix(flat, place) for name, place in self.layout.items()}


Layout = dict[str, tuple[int, tuple[int, int]]]
"""Of each named matrix, its offset in a flat tensor and its shape."""


def layout_of(targets: Mapping[str, LinearShape], rank: int, value_head: int) -> tuple[Layout, int]:
    """Where the matrices of an adapter lie, and how many elements they are."""
    shapes = {
        f"{name}.{part}": size
        for name, shape in targets.items()
        for part, size in (("lora_A", (rank, shape.in_features)), ("lora_B", (shape.out_features, rank)))
    }
    if value_head:
        shapes[VALUE_HEAD] = (1, value_head)
    ends = list(accumulate(rows * columns for rows, columns in shapes.values()))
    offsets = [0, *ends]
    return {
        name: (offset, shape) for (name, shape), offset in zip(shapes.items(), offsets, strict=False)
    }, offsets[-1]


def matrix(flat: Tensor, place: tuple[int, tuple[int, int]]) -> Tensor:
    """The matrix at a place of a flat tensor, or of each of several [..., elements]; it shares storage."""
    offset, (rows, columns) = place
    return flat[..., offset : offset + rows * columns].unflatten(-1, (rows, columns))


def _hashed(*parts: str) -> int:
    digest = hashlib.blake2b("\0".join(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
