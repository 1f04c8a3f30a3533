"""LoRA adapters of many tenants on one frozen base model.

y += x A^T B^T * (alpha / rank), with A [rank, in] and B [out, rank] float32 masters. A micro-batch is one run
of tokens; those of one operation follow each other and form a segment, and the forward hooks on the base
model's linears add to each segment its own adapter. A critic's adapter has a value head beside its matrices:
v = w . h, with w [1, hidden] starting at zero and h the last hidden state.

Invariant: the autograd graph never touches the masters. Each operation differentiates through leaves of
its own that share the masters' storage and collect that operation's gradient alone, so one operation can
be dropped, and no row can reach another model's gradient.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

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


@dataclass(frozen=True)
class LoraPair:
    """A [rank, in] and B [out, rank] of one linear, with the scale."""

    a: Tensor
    b: Tensor
    scale: float

    def add_to(self, output: Tensor, x: Tensor) -> Tensor:
        """output + x A^T B^T * scale; `x` [..., in], `output` [..., out], in the dtype of `x`."""
        low = x.reshape(-1, x.shape[-1]) @ self.a.to(x.dtype).T
        flat = output.reshape(-1, output.shape[-1])
        return torch.addmm(flat, low, self.b.to(x.dtype).T, alpha=self.scale).view_as(output)


Part = tuple[int, LoraPair | None]
"""So many consecutive tokens, and the adapter of one linear that they use."""


@dataclass(frozen=True)
class Leaves:
    """What one operation differentiates: matrices by module and, of a critic, the value head [1, hidden]."""

    pairs: Mapping[str, LoraPair]
    value_head: Tensor | None = None


class Adapter:
    """One model's adapter: all A and B, and a critic's value head, in one flat float32 tensor on the device.

    Attributes:
        spec: how it was made.
        flat: the masters, one after the other.
        layout: name ("<module>.lora_A", "<module>.lora_B", `VALUE_HEAD`) -> (offset, shape) into a flat
            tensor.
    """

    def __init__(
        self, spec: LoraSpec, targets: Mapping[str, LinearShape], model_id: str, device: str, hidden_size: int
    ) -> None:
        self.spec = spec
        self.scale = LORA_ALPHA / spec.rank
        self.targets = tuple(targets)
        self.layout: dict[str, tuple[int, tuple[int, int]]] = {}
        offset = 0
        for name, shape in targets.items():
            for part, size in (
                ("lora_A", (spec.rank, shape.in_features)),
                ("lora_B", (shape.out_features, spec.rank)),
            ):
                self.layout[f"{name}.{part}"] = (offset, size)
                offset += size[0] * size[1]
        if spec.role == "critic":
            self.layout[VALUE_HEAD] = (offset, (1, hidden_size))
            offset += hidden_size
        flat = torch.zeros(offset, dtype=torch.float32)
        seed = spec.seed if spec.seed is not None else _hashed("model", model_id)
        views = self.views(flat)
        for name, shape in targets.items():
            generator = torch.Generator().manual_seed(_hashed(str(seed), name))
            # Kaiming uniform with a = sqrt(5).
            bound = 1 / math.sqrt(shape.in_features)
            views[f"{name}.lora_A"].uniform_(-bound, bound, generator=generator)
        self.flat = flat.to(device)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """`flat` cut into the adapter's named matrices, sharing storage."""
        return {
            name: flat[offset : offset + rows * columns].view(rows, columns)
            for name, (offset, (rows, columns)) in self.layout.items()
        }

    def leaves(self, gradient: Tensor | None = None) -> Leaves:
        """The matrices, for one operation.

        Args:
            gradient: flat tensor that backward passes add to; None for a forward without gradient.
        """
        masters = self.views(self.flat)
        if gradient is not None:
            slots = self.views(gradient)
            for name, master in masters.items():
                leaf = master.detach().requires_grad_()
                leaf.grad = slots[name]
                masters[name] = leaf
        pairs = {
            name: LoraPair(masters[f"{name}.lora_A"], masters[f"{name}.lora_B"], self.scale)
            for name in self.targets
        }
        return Leaves(pairs, masters.get(VALUE_HEAD))


def _hashed(*parts: str) -> int:
    digest = hashlib.blake2b("\0".join(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens that share an adapter; with a value head, a critic's. Critics' come last."""

    tokens: int
    pairs: Mapping[str, LoraPair]
    value_head: Tensor | None = None


class LoraRouter:
    """Tells the hooks which tokens of the current micro-batch use which adapter."""

    def __init__(self) -> None:
        self._segments: Sequence[Segment] = ()

    @contextmanager
    def route(self, segments: Sequence[Segment]) -> Iterator[None]:
        """Routes forward and backward passes within the context; the segments tile the batch's tokens."""
        self._segments = segments
        try:
            yield
        finally:
            self._segments = ()

    def hook(self, linear: nn.Linear, name: str) -> None:
        """Makes `linear` add the routed adapters' matrices of this name to its output."""

        def add_adapters(_module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            return self._add(name, args[0], output)

        linear.register_forward_hook(add_adapters)

    def head_parts(self, start: int, stop: int) -> list[Part]:
        """Tokens `start` .. `stop` - 1, which have targets, by head adapter; one part when nothing is
        routed."""
        if not self._segments:
            return [(stop - start, None)]
        parts, low = [], 0
        for segment in self._segments:
            if segment.value_head is None:
                high = low + segment.tokens
                if (within := min(high, stop) - max(low, start)) > 0:
                    parts.append((within, segment.pairs.get(HEAD)))
                low = high
        if low < stop:
            raise RuntimeError(f"segments cover {low} tokens of {stop}")
        return parts

    def values(self, hidden: Tensor) -> Tensor:
        """Value of each position, by the value head of its segment.

        Args:
            hidden: [V, hidden], the tokens of the routed critics' segments one after the other.

        Returns:
            float32 [V].
        """
        heads = [segment for segment in self._segments if segment.value_head is not None]
        parts = hidden.float().split([segment.tokens for segment in heads])
        values = [
            (part @ segment.value_head.T)[:, 0]
            for segment, part in zip(heads, parts, strict=True)
            if segment.value_head is not None
        ]
        # Also without tokens the graph goes through the hidden states, on all ranks of a collective alike.
        return torch.cat(values) if values else hidden.float().sum(-1)

    def _add(self, name: str, x: Tensor, output: Tensor) -> Tensor:
        parts = [(segment.tokens, segment.pairs.get(name)) for segment in self._segments]
        flat = x.reshape(-1, x.shape[-1])
        if parts and sum(tokens for tokens, _ in parts) != flat.shape[0]:
            raise RuntimeError(f"{name} was given {flat.shape[0]} tokens, which are not those of the batch")
        return add_adapters(parts, flat, output.reshape(-1, output.shape[-1])).view_as(output)


def add_adapters(parts: Sequence[Part], x: Tensor, output: Tensor) -> Tensor:
    """What a linear of the base made of `x`, with each part's adapter added.

    The parts tile the first axis of both.
    """
    if all(pair is None for _, pair in parts):
        return output
    if len(parts) == 1:
        ((_, pair),) = parts
        return output if pair is None else pair.add_to(output, x)
    # Split once: the backward pass of a slice would fill a tensor of the whole batch per part.
    sizes = [size for size, _ in parts]
    split = zip((pair for _, pair in parts), output.split(sizes), x.split(sizes), strict=True)
    return torch.cat([out if pair is None else pair.add_to(out, inner) for pair, out, inner in split])
