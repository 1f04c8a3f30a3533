"""What a language model, dense or of experts, needs to be trained and sampled: arithmetic over its shape.

Where it comes from:

- Weights: parameters times bytes of their type. The parameters are counted from the shape as Llama and Qwen3
  define it; the published shapes are those of the models' own config.json.
- Activations: what PyTorch keeps for the backward pass of one micro-batch. Bytes per token and layer are
  linear in the layer's widths; the coefficients were measured on Qwen3 layers with the trainer's adapters on
  every linear, and tests/unit/launcher/doctor/test_sizing.py measures them again. On GPUs (elements of 2
  bytes) a layer keeps its input alone, and one layer at a time is computed again. What linear attention keeps
  is as the trainer counts it (trainer/compute/memory/capacity.py, trainer/compute/recurrent/layers.py).
- An adapter of rank r has r * (in + out) parameters in every linear; in experts, the factor beside the
  model's width is there once, as in trainer/compute/lora/experts.py. What training keeps of each is
  the trainer's own count (trainer/compute/memory/capacity.py), on one rank.
- A model that trains all weights takes 24 bytes a parameter (README.md, "In your terms").
- Keys and values: 2 * layers * kv_heads * head_dim elements a token, of layers with full attention; linear
  attention has a state of value_heads * key_dim * value_dim float32 numbers a sequence instead.
- Slots for adapters: vLLM holds `max_loras` of them at the largest rank in the type of the base.
- `OVERHEAD` for a CUDA context, kernels and communication is an allowance, not a measurement.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

GIB = 1 << 30
OVERHEAD = 2 * GIB
FULL_BYTES = 24
FLOAT32 = 4
Linears = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Experts:
    """The routed experts of a layer.

    Attributes:
        active: that a token has.
        inner: features within one; `shared`: within the expert of all tokens, 0 = there is none.
        dense_layers: layers that have none.
    """

    count: int
    active: int
    inner: int
    shared: int = 0
    dense_layers: int = 0


@dataclass(frozen=True)
class LinearAttention:
    """Gated delta rule of Qwen3-Next and Qwen3.5, in some layers in the place of attention.

    Attributes:
        layers: that have it.
        key_heads, value_heads: and `key_dim` and `value_dim` of each.
        taps: of its convolution.
        fused: it makes all of a token by two linears, and not by four.
    """

    layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    fused: bool

    @property
    def convolved(self) -> int:
        """Features that its convolution mixes."""
        return 2 * self.key_heads * self.key_dim + self._values

    @property
    def state(self) -> int:
        """Numbers that go on from token to token, beside what the convolution reaches back to."""
        return self.value_heads * self.key_dim * self.value_dim

    def linears(self, hidden: int) -> Linears:
        """(in, out) of its linears."""
        made = [self.convolved, self._values, self.value_heads, self.value_heads]
        if self.fused:
            made = [self.convolved + self._values, 2 * self.value_heads]
        return (*((hidden, each) for each in made), (self._values, hidden))

    def kept_bytes(self, hidden: int, item: int) -> float:
        """Of one token, for the backward pass."""
        of_head = 8 * self.key_dim + 4 * self.value_dim + self.key_dim * self.value_dim / 16 + 5 * 64
        of_linears = 1.3 * item * _ends(self.linears(hidden))
        return of_linears + 3 * item * self.convolved + FLOAT32 * self.value_heads * of_head

    @property
    def _values(self) -> int:
        return self.value_heads * self.value_dim


@dataclass(frozen=True)
class Shape:
    """A decoder with gated feed-forward layers, as in a Hugging Face config.json.

    Attributes:
        linear: of which some layers have linear attention; what attention is left then has gates, too.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    experts: Experts | None = None
    linear: LinearAttention | None = None

    @property
    def attention(self) -> Linears:
        """(in, out) of the linears of attention in one layer."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        asked = query if self.linear is None else 2 * query
        return ((self.hidden, asked), (self.hidden, key), (self.hidden, key), (query, self.hidden))

    @property
    def attending_layers(self) -> int:
        """Layers with full attention."""
        return self.layers - (0 if self.linear is None else self.linear.layers)

    def feed_forward(self, inner: int) -> Linears:
        """The same of a feed-forward block of so many features."""
        return ((self.hidden, inner), (self.hidden, inner), (inner, self.hidden))

    @property
    def dense_layers(self) -> int:
        """Layers without routed experts."""
        return self.layers if self.experts is None else self.experts.dense_layers

    @property
    def parameters(self) -> int:
        """Norms and biases, far below a thousandth, are left out."""
        total = self.attending_layers * _weights(self.attention)
        if (linear := self.linear) is not None:
            total += linear.layers * (_weights(linear.linears(self.hidden)) + linear.taps * linear.convolved)
        total += self.dense_layers * _weights(self.feed_forward(self.intermediate))
        if self.experts is not None:
            each = self.experts.count * (_weights(self.feed_forward(self.experts.inner)) + self.hidden)
            each += _weights(self.feed_forward(self.experts.shared))
            total += (self.layers - self.dense_layers) * each
        return total + (1 if self.tied else 2) * self.vocabulary * self.hidden

    def adapter_parameters(self, rank: int) -> int:
        """Of an adapter on everything: attention, feed-forward, experts and output head."""
        total = self.attending_layers * _ends(self.attention) + self.hidden + self.vocabulary
        if self.linear is not None:
            total += self.linear.layers * _ends(self.linear.linears(self.hidden))
        total += self.dense_layers * _ends(self.feed_forward(self.intermediate))
        if self.experts is not None:
            each = 3 * (self.hidden + self.experts.count * self.experts.inner)
            each += _ends(self.feed_forward(self.experts.shared)) if self.experts.shared else 0
            total += (self.layers - self.dense_layers) * each
        return rank * total

    def kv_bytes(self, item: int) -> int:
        """Of one token's keys and values, with elements of `item` bytes."""
        return 2 * self.attending_layers * self.kv_heads * self.head_dim * item

    def state_bytes(self, item: int) -> int:
        """Of one sequence whatever its length, with elements of `item` bytes where they are not float32."""
        if (linear := self.linear) is None:
            return 0
        return linear.layers * (FLOAT32 * linear.state + item * (linear.taps - 1) * linear.convolved)

    def activation_bytes(self, item: int) -> int:
        """Of one token of a micro-batch, with elements of 2 or 4 bytes."""
        attending, linear = self._layer_bytes(item)
        return self.attending_layers * attending + (self.layers - self.attending_layers) * linear

    def _layer_bytes(self, item: int) -> tuple[int, int]:
        """The same in a layer with full attention, and in one with linear attention."""
        attention = (self.heads + self.kv_heads) * self.head_dim
        inner, rows = self.intermediate, 0
        if self.experts is not None:
            # As many as a layer with experts has, which is the most.
            inner = self.experts.active * self.experts.inner + self.experts.shared
            rows = self.experts.active * self.hidden
        if item == 2:
            beside, attends = 12 * self.hidden + 8 * inner + 2 * rows, 8 * attention + 12 * self.heads
        else:
            beside, attends = 16 * self.hidden + 16 * inner + 4 * rows, 12 * attention + 12 * self.heads
        linear = 0.0 if self.linear is None else beside + self.linear.kept_bytes(self.hidden, item)
        return beside + attends, int(linear)

    def kept_bytes(self, item: int) -> int:
        """Of the same, what is held at once: the inputs of all layers and one of these, where they are
        computed again."""
        if item != 2:
            return self.activation_bytes(item)
        return self.layers * self.hidden * item + max(self._layer_bytes(item))


def _weights(linears: Linears) -> int:
    return sum(inner * outer for inner, outer in linears)


def _ends(linears: Linears) -> int:
    return sum(inner + outer for inner, outer in linears)


# layers, hidden, intermediate, heads, kv_heads, head_dim, vocabulary, tied
PUBLISHED = {
    "SmolLM2-135M": Shape(30, 576, 1536, 9, 3, 64, 49152, True),
    "Qwen3-0.6B": Shape(28, 1024, 3072, 16, 8, 128, 151936, True),
    "Qwen3-1.7B": Shape(28, 2048, 6144, 16, 8, 128, 151936, True),
    "Qwen3-4B": Shape(36, 2560, 9728, 32, 8, 128, 151936, True),
    "Qwen3-8B": Shape(36, 4096, 12288, 32, 8, 128, 151936, False),
    "Qwen3-14B": Shape(40, 5120, 17408, 40, 8, 128, 151936, False),
    "gpt-oss-20b": Shape(24, 2880, 2880, 64, 8, 64, 201088, False, Experts(32, 4, 2880)),
    "Qwen3-30B-A3B": Shape(48, 2048, 6144, 32, 4, 128, 151936, False, Experts(128, 8, 768)),
    "Qwen3-32B": Shape(64, 5120, 25600, 64, 8, 128, 151936, False),
    "Qwen2.5-72B": Shape(80, 8192, 29568, 64, 8, 128, 152064, False),
    "gpt-oss-120b": Shape(36, 2880, 2880, 64, 8, 64, 201088, False, Experts(128, 4, 2880)),
}
FARTHEST = 2.5
"""A model so many times larger or smaller than another tells nothing of it."""


def nearest(parameters: int) -> str | None:
    """The published model that is nearest in size; None when it is `FARTHEST` from it."""

    def away(name: str) -> float:
        return abs(math.log(PUBLISHED[name].parameters / parameters))

    found = min(PUBLISHED, key=away)
    return found if away(found) < math.log(FARTHEST) else None


@dataclass(frozen=True)
class Load:
    """What is to be held.

    Attributes:
        item: bytes of an element of the base model: 2 = bfloat16, 4 = float32.
        micro_batch_tokens: of the trainer.
        rank: of the adapter that trains.
        max_rank, max_loras: of the sampler.
        context: tokens of a sequence; the sampler has room for two.
    """

    item: int
    micro_batch_tokens: int
    rank: int = 32
    max_rank: int = 128
    max_loras: int = 8
    context: int = 8192


def trainer_bytes(shape: Shape, load: Load) -> dict[str, int]:
    """Of one rank with ZeRO 0, by what takes them."""
    return {
        "weights": shape.parameters * load.item,
        "activations": shape.kept_bytes(load.item) * load.micro_batch_tokens,
        "adapter and optimizer": _adapter_item(load.item) * shape.adapter_parameters(load.rank),
        "overhead": OVERHEAD,
    }


def _adapter_item(item: int) -> int:
    """What a parameter of one adapter takes: master, two gradients and two moments in float32, and what
    computes where that is a copy."""
    return 5 * FLOAT32 + (item if item != FLOAT32 else 0)


def sampler_bytes(shape: Shape, load: Load) -> dict[str, int]:
    """Of a replica on one device, by what takes them."""
    return {
        "weights": shape.parameters * load.item,
        "keys and values": 2 * (load.context * shape.kv_bytes(load.item) + shape.state_bytes(load.item)),
        "slots for adapters": load.max_loras * shape.adapter_parameters(load.max_rank) * load.item,
        "overhead": OVERHEAD,
    }


def largest_micro_batch(shape: Shape, load: Load, room: int) -> int:
    """Most tokens, a power of two and at most the load's, with which a trainer takes no more than `room`
    bytes; 0 = it does not fit even with 256."""
    taken = trainer_bytes(shape, load)
    rest = room - (sum(taken.values()) - taken["activations"])
    tokens = load.micro_batch_tokens
    while tokens >= 256:
        if shape.kept_bytes(load.item) * tokens <= rest:
            return tokens
        tokens //= 2
    return 0
