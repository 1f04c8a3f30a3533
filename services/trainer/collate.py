"""Turns rows of host bytes into the tensors of one physical batch, and results back into host bytes.

Invariant: which positions count is decided by each row's own length, never by the value of a token, weight
or advantage; padding stands on the right, where causal attention keeps it from every real position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.common.loss_schema import ITEM_TYPES
from services.trainer.plan import HostArray, Row

TARGETS = "target_tokens"


@dataclass(frozen=True)
class Collated:
    """One physical batch.

    Attributes:
        tokens: int64 [B, T].
        positions: int64 [P], the real positions of all rows, row after row, as indices into [B * T].
        targets: int64 [P, K], K the most targets per position of any row; unused columns hold 0.
        spans: each row's (start, stop) in P.
        inputs: each row's other loss inputs, in their own shape, on the device.
    """

    tokens: Tensor
    positions: Tensor
    targets: Tensor
    spans: list[tuple[int, int]]
    inputs: list[dict[str, Tensor]]


def collate(rows: Sequence[Row], device: str) -> Collated:
    """The batch of `rows`, at least one, which passed `loss_schema.check_datum`."""
    lengths = [row.length for row in rows]
    longest = max(lengths)
    tokens = np.zeros((len(rows), longest), dtype=np.int64)
    targets = np.zeros((sum(lengths), max(_columns(row) for row in rows)), dtype=np.int64)
    positions, spans, start = [], [], 0
    for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        tokens[number, :length] = np.frombuffer(row.tokens, ITEM_TYPES["int32"])
        row_targets = host_values(row.loss_inputs[TARGETS]).reshape(length, -1)
        targets[start : start + length, : row_targets.shape[1]] = row_targets
        positions.append(np.arange(length, dtype=np.int64) + number * longest)
        spans.append((start, start + length))
        start += length
    return Collated(
        tokens=torch.from_numpy(tokens).to(device),
        positions=torch.from_numpy(np.concatenate(positions)).to(device),
        targets=torch.from_numpy(targets).to(device),
        spans=spans,
        inputs=_loss_inputs(rows, device),
    )


def idle_batch(device: str) -> Collated:
    """One masked position, for a rank that has to take part in a collective pass without any row."""
    zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
    return Collated(zero, zero[0], zero, [], [])


def host_values(array: HostArray) -> np.ndarray:
    """Read-only view of a host array, in its shape."""
    return np.frombuffer(array.data, ITEM_TYPES[array.dtype]).reshape(array.shape)


def host_array(values: np.ndarray) -> HostArray:
    """A host array of float32 values."""
    return HostArray("float32", tuple(values.shape), values.astype("<f4", copy=False).tobytes())


def _columns(row: Row) -> int:
    shape = row.loss_inputs[TARGETS].shape
    return shape[1] if len(shape) == 2 else 1


def _loss_inputs(rows: Sequence[Row], device: str) -> list[dict[str, Tensor]]:
    """Every row's inputs; one transfer to the device per input name, not per row."""
    result: list[dict[str, Tensor]] = [{} for _ in rows]
    for name in sorted({name for row in rows for name in row.loss_inputs} - {TARGETS}):
        owners = [number for number, row in enumerate(rows) if name in row.loss_inputs]
        arrays = [host_values(rows[number].loss_inputs[name]) for number in owners]
        flat = torch.from_numpy(np.concatenate([array.ravel() for array in arrays])).to(device)
        parts = flat.split([array.size for array in arrays])
        for number, array, part in zip(owners, arrays, parts, strict=True):
            result[number][name] = part.view(array.shape)
    return result


def metric_values(parts: Sequence[Mapping[str, Tensor]]) -> list[dict[str, float]]:
    """Host values of 0-d tensors, in one transfer."""
    values = [value.detach().double() for part in parts for value in part.values()]
    numbers = iter(torch.stack(values).tolist() if values else [])
    return [{name: next(numbers) for name in part} for part in parts]
