"""What of a model is trained, as its record and its checkpoints tell."""

from __future__ import annotations

from services.common.contract.roles import Role
from services.gateway.records.checkpoint import CheckpointRecord
from services.gateway.records.model import ModelRecord
from tinsmith.v1 import models_pb2


def shape(record: ModelRecord | CheckpointRecord) -> tuple[int, bool, bool, bool, Role]:
    """Equal for models of one base whose tensors have the same names and sizes."""
    return (record.lora_rank, record.train_attn, record.train_mlp, record.train_unembed, record.role)


def kind_of(record: CheckpointRecord) -> str:
    """What a user calls it."""
    return f"of rank {record.lora_rank}" if record.lora_rank else "all of whose weights are trained"


def lora_of(record: ModelRecord | CheckpointRecord) -> models_pb2.LoraConfig | None:
    """The adapter, without its seed; None when all weights are trained."""
    if record.lora_rank == 0:
        return None
    return models_pb2.LoraConfig(
        rank=record.lora_rank,
        train_attn=record.train_attn,
        train_mlp=record.train_mlp,
        train_unembed=record.train_unembed,
    )
