"""What an adapter is made of, and where its matrices lie in one flat tensor.

Invariant: its initial values depend on its seed, or else its model's id, and on nothing else. Every rank has
all that passes compute with; of masters that are beside it, its part.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from services.common.contract import roles
from services.common.contract.adapters import LORA_ALPHA
from services.common.contract.errors import InvalidRequest
from services.trainer.compute.data import LoraSpec
from services.trainer.compute.lora import parts
from services.trainer.compute.lora.parts import Part

HEAD = "lm_head"
VALUE_HEAD = "value_head.weight"
MAX_RANK = 256
_FLAGS = ("train_attn", "train_mlp", "train_unembed")
_ATTENTION = {"self_attn", "self_attention", "attn", "attention", "linear_attn"}
_MLP = {"mlp", "feed_forward", "block_sparse_moe", "moe", "experts", "shared_expert", "shared_experts"}
_OTHER_MIXERS = {"mamba", "conv", "temporal_block"}
_OTHER_MLP = {"shared_mlp", "mlps", "ffn", "fc1", "fc2"}
"""What stands in their places in other architectures, and is not adapted: kernels read some of these weights
themselves, and nobody has compared what PEFT and vLLM make of such adapters."""
_ROUTERS = {"gate", "router", "shared_expert_gate", "indexer"}
"""What chooses experts, or weighs one, is not trained: with other choices it would be another model. Nor is
what chooses the tokens that sparse attention sees, through which no gradient goes."""


def kind_of(name: str) -> str | None:
    """The flag of a `LoraSpec` that promises to train a weight or linear of this name; None: none does."""
    if name == HEAD:
        return "train_unembed"
    parts = name.split(".")
    if _ROUTERS & set(parts):
        return None
    for part in parts:
        if part in _ATTENTION:
            return "train_attn"
        if part in _MLP:
            return "train_mlp"
    return None


def promised_by(name: str) -> set[str]:
    """The flags that could be said to promise a weight of a block. Of one that no `kind_of` knows it is both,
    where nothing tells whether it mixes tokens or is of a feed-forward."""
    kind = kind_of(name)
    parts = set(name.split("."))
    if kind is not None or _ROUTERS & parts:
        return {kind} if kind is not None else set()
    if parts & _OTHER_MIXERS:
        return {"train_attn"}
    return {"train_mlp"} if parts & _OTHER_MLP else {"train_attn", "train_mlp"}


@dataclass(frozen=True)
class LinearShape:
    """Features of an adaptable linear.

    Attributes:
        experts: of one that is there once for each of several experts, how many A and how many B it has, one
            of which is for all experts; None: it is no experts'.
    """

    in_features: int
    out_features: int
    experts: tuple[int, int] | None = None

    def matrices(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of A and B: [rank, in] and [out, rank], experts' with their number before."""
        a, b = (rank, self.in_features), (self.out_features, rank)
        return (a, b) if self.experts is None else ((self.experts[0], *a), (self.experts[1], *b))


def select_targets(
    linears: Mapping[str, LinearShape], spec: LoraSpec, unadapted: Sequence[str] = ()
) -> dict[str, LinearShape]:
    """The linears an adapter of `spec` adapts, in the base model's order.

    Args:
        linears: every adaptable linear of the base model by name.
        unadapted: weights of its blocks that can have no adapter.

    Raises:
        InvalidRequest: no target is chosen, the base model has no linear of a chosen kind, or other weights
            of that kind too, or a critic's value head would not be trained.
    """
    if not 1 <= spec.rank <= MAX_RANK:
        raise InvalidRequest(f"lora rank must be from 1 to {MAX_RANK}, got {spec.rank}")
    roles.check_trains_head(spec.role, spec.train_unembed)
    flags = {flag: getattr(spec, flag) for flag in _FLAGS}
    if not any(flags.values()):
        raise InvalidRequest("the adapter would train nothing; set train_attn, train_mlp or train_unembed")
    if spec.role == "critic":
        # Its head is the value head; the vocabulary's is no part of the model.
        del flags["train_unembed"]
    for flag in (flag for flag, chosen in flags.items() if chosen):
        left = [name for name in unadapted if flag in promised_by(name)]
        if left:
            whole = ", ".join(each for each in _FLAGS if each in _whole(linears, unadapted))
            raise InvalidRequest(
                f"{flag} would train a part of the base model's weights only: those of {left[0]} and others "
                f"like it cannot have adapters here; set {flag} to false. Adapters can train {whole}",
                "not_adaptable",
            )
        if not any(kind_of(name) == flag for name in linears):
            raise InvalidRequest(f"the base model has nothing that {flag} could adapt; set {flag} to false")
    return {name: shape for name, shape in linears.items() if flags.get(kind_of(name) or "")}


def largest(linears: Mapping[str, LinearShape], rank: int, unadapted: Sequence[str] = ()) -> LoraSpec:
    """The policy's adapter that trains all that the base model lets one train.

    Args:
        unadapted: as in `select_targets`.
    """
    whole = _whole(linears, unadapted)
    return LoraSpec(
        rank,
        seed=0,
        train_attn="train_attn" in whole,
        train_mlp="train_mlp" in whole,
        train_unembed="train_unembed" in whole,
    )


def _whole(linears: Iterable[str], unadapted: Iterable[str]) -> set[str]:
    """The flags that train all they promise, and something."""
    left = {flag for name in unadapted for flag in promised_by(name)}
    return {kind for name in linears if (kind := kind_of(name)) is not None} - left


class Adapter:
    """One model's adapter: all A and B, and a critic's value head, in one flat float32 tensor on the device.

    Args:
        dtype: the base model's element type.
        ranks, rank: of the world, and this one's.
        drawn: it begins with its initial values. Otherwise with zeros, and a state is loaded next.

    Attributes:
        spec: how it was made.
        part: of the flat tensor, what this rank steps.
        flat: the masters that this rank holds: all of them [size], one after the other, or, where `low` is a
            copy and there are other ranks, its part [part.elements].
        own: of those, what this rank steps.
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
        ranks: int = 1,
        rank: int = 0,
        *,
        drawn: bool = True,
    ) -> None:
        self.spec = spec
        self.scale = LORA_ALPHA / spec.rank
        self.targets = dict(targets)
        self.layout, size = layout_of(targets, spec.rank, hidden_size if spec.role == "critic" else 0)
        self.part = Part(size, ranks, rank)
        self._computes = torch.zeros(self.part.padded, dtype=dtype, device=device)
        self.low = self._computes[:size]
        self.flat, self.own = self.low, self.part.of(self.low)
        if dtype != torch.float32:
            self.flat = torch.zeros(self.part.elements, dtype=torch.float32, device=device)
            self.own = self.flat[: self.own.numel()]
        self._head: Tensor | None = None
        """A value head whose masters are spread over the ranks: it computes in float32."""
        if self.value_head and not self.holds_all:
            self._head = torch.zeros(self.value_head, dtype=torch.float32, device=device)
        if drawn:
            self.load(self._initial(spec.seed if spec.seed is not None else _hashed("model", model_id)))

    def _initial(self, seed: int) -> Tensor:
        """What a fresh one begins with, float32 [size] on the host."""
        flat = torch.zeros(self.part.size, dtype=torch.float32)
        views = self.views(flat)
        for name, shape in self.targets.items():
            generator = torch.Generator().manual_seed(_hashed(str(seed), name))
            # Kaiming uniform with a = sqrt(5).
            bound = 1 / math.sqrt(shape.in_features)
            views[f"{name}.lora_A"].uniform_(-bound, bound, generator=generator)
        return flat

    @property
    def holds_all(self) -> bool:
        """Whether this rank, and so every one, has all masters."""
        return self.part.ranks == 1 or self.low is self.flat

    @property
    def mib(self) -> float:
        """Of one copy of all masters."""
        return 4 * self.part.size / 2**20

    @property
    def value_head(self) -> int:
        """Elements of the value head: 0 of a policy, the hidden width of a critic."""
        return self.layout[VALUE_HEAD][1][1] if VALUE_HEAD in self.layout else 0

    @property
    def value_weights(self) -> Tensor:
        """A critic's value head, float32 [1, hidden]."""
        if self._head is not None:
            return self._head[None]
        return matrix(self.flat, self.layout[VALUE_HEAD])

    def load(self, flat: Tensor) -> None:
        """Replaces the masters by these, float32 [size] on the host."""
        if self.holds_all:
            self.flat.copy_(flat)
            if self.low is not self.flat:
                self.low.copy_(self.flat)
            return
        self.own.copy_(self.part.of(flat))
        self.low.copy_(flat)
        if self._head is not None:
            self._head.copy_(flat[-self.value_head :])

    def begin_renewal(self) -> list[Any]:
        """Every rank has changed its own masters: has all of them compute with those. What is waited for."""
        if self.low is not self.flat:
            self.part.of(self.low).copy_(self.own)
        if self.part.ranks == 1:
            return []
        under_way = [parts.begin_share(self._computes, self.part)]
        if self._head is not None:
            # It lies last, and so in few ranks' parts.
            before = self.part.size - self.value_head
            start = self.part.rank * self.part.elements
            mine = self.own[max(before - start, 0) :]
            self._head.zero_()[max(start - before, 0) :][: mine.numel()].copy_(mine)
            under_way.append(parts.begin_joining(self._head))
        return under_way

    def tensors(self) -> list[Tensor]:
        """What it has memory of its own in; all others are views."""
        masters = [] if self.low is self.flat else [self.flat]
        return [self._computes, *masters, *([] if self._head is None else [self._head])]

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """`flat` cut into the adapter's named matrices, sharing storage."""
        return matrices(flat, self.layout)


Layout = dict[str, tuple[int, tuple[int, ...]]]
"""Of each named matrix, or of the matrices of experts, the offset in a flat tensor and the shape."""


def layout_of(targets: Mapping[str, LinearShape], rank: int, value_head: int) -> tuple[Layout, int]:
    """Where the matrices of an adapter lie, and how many elements they are."""
    shapes = {
        f"{name}.{part}": size
        for name, shape in targets.items()
        for part, size in zip(("lora_A", "lora_B"), shape.matrices(rank), strict=True)
    }
    if value_head:
        shapes[VALUE_HEAD] = (1, value_head)
    ends = list(accumulate(math.prod(shape) for shape in shapes.values()))
    offsets = [0, *ends]
    return {
        name: (offset, shape) for (name, shape), offset in zip(shapes.items(), offsets, strict=False)
    }, offsets[-1]


def matrix(flat: Tensor, place: tuple[int, tuple[int, ...]]) -> Tensor:
    """What is at a place of a flat tensor, or of each of several [..., elements]; it shares storage."""
    offset, shape = place
    return flat[..., offset : offset + math.prod(shape)].unflatten(-1, shape)


def matrices(flat: Tensor, layout: Layout) -> dict[str, Tensor]:
    """A flat tensor cut into what is in it, by name; they share its storage."""
    return {name: matrix(flat, place) for name, place in layout.items()}


def _hashed(*parts: str) -> int:
    digest = hashlib.blake2b("\0".join(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
