"""What a trainer world is told to do and what it answers: plain data, no torch.

Everything here is a `msgspec.Struct`, so that rank 0 can broadcast it to the other ranks as msgpack
bytes. Invariant: a plan holds all that a rank needs; nothing in it refers to state of one process.
"""

from __future__ import annotations

import msgspec

from services.common.contract.experts.routing import RoutedExperts
from services.common.contract.roles import Role
from services.common.contract.tensors import HostTensor


class LoraSpec(msgspec.Struct, frozen=True):
    """Shape and initial values of an adapter, and what the model's head computes. `seed` None: derived
    from the model's id. A critic's `train_unembed` stands for its value head, which it always trains."""

    rank: int
    seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    role: Role = "policy"


class AdamSpec(msgspec.Struct, frozen=True):
    """Parameters of one AdamW step. `grad_clip_norm` is the largest global L2 norm; 0 = no clipping."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class Row(msgspec.Struct, frozen=True):
    """One datum to run."""

    op: int
    """Index into `Pass.ops`."""
    index: int
    """Position of the datum within its operation."""
    tokens: bytes
    """int32 little-endian, shape [N]."""
    loss_inputs: dict[str, HostTensor]
    routed: RoutedExperts | None = None
    """The experts that its tokens go to; None: the model's own choice."""

    @property
    def length(self) -> int:
        """N, tokens."""
        return len(self.tokens) // 4


class PassOp(msgspec.Struct, frozen=True):
    """One forward or forward_backward operation that a pass runs."""

    model_id: str
    seq_id: int
    loss_fn: str
    loss_config: dict[str, float] = {}
    forward_only: bool = False


class MicroBatch(msgspec.Struct, frozen=True):
    """One micro-batch. Its rows may belong to several operations and models."""

    rows: list[Row]
    split: bool = False
    """It has one row, which all ranks compute together."""


class Pass(msgspec.Struct, frozen=True):
    """What the world computes at once: every rank gets the same Pass."""

    ops: list[PassOp]
    micro_batches: list[MicroBatch]


class Failure(msgspec.Struct, frozen=True):
    """Why an operation failed, in the terms of `services.common.contract.errors`."""

    category: str
    code: str
    message: str


class RowResult(msgspec.Struct, frozen=True):
    """What one row came to. With `failure`, its whole operation failed and left no gradient behind."""

    op: int
    index: int
    outputs: dict[str, HostTensor] = {}
    """By name, float32: "logprobs" in the shape of target_tokens, or a critic's "values" [N]."""
    metrics: dict[str, float] = {}
    """This row's part of the operation's metrics; `losses.combine_metrics` joins the parts."""
    failure: Failure | None = None


class ModelState(msgspec.Struct, frozen=True, tag=True):
    """All that makes up an adapter between two steps, float32 on the host.

    `adapter` holds `<module>.lora_A` [rank, in] and `<module>.lora_B` [out, rank], and of a critic
    `value_head.weight` [1, hidden]. `optimizer` holds `<name>.exp_avg` and `<name>.exp_avg_sq` of each, and
    nothing before the first step; `step` counts the optimizer steps taken.

    Or with `lora` None what a model that trains all weights computes with, by Hugging Face name, in the base
    model's element type and without moments.
    """

    lora: LoraSpec | None
    adapter: dict[str, HostTensor]
    optimizer: dict[str, HostTensor]
    step: int

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(len(each.data) for part in (self.adapter, self.optimizer) for each in part.values())


class ShardedState(msgspec.Struct, frozen=True, tag=True):
    """All that makes up a model that trains all weights between two steps: files of a directory that every
    rank can read, `step` steps taken."""

    directory: str
    step: int

    @property
    def lora(self) -> None:
        """Of no adapter."""
        return None
