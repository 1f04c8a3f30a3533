"""Turns rows of host bytes into the tensors of one micro-batch, and results back into host bytes.

Invariant: which positions count is decided by each row's own length, never by the value of a token, weight
or advantage; padding stands on the right, where causal attention keeps it from every real position. A row
without targets is a critic's: its positions have values, the others' have log-probabilities of targets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.common.contract.loss_schema import TARGETS
from services.common.contract.tensors import DTYPES, HostTensor, from_values
from services.trainer.compute.data import Row, RowResult
from services.trainer.compute.logprobs import Targets, widths_of


@dataclass(frozen=True)
class Collated:
    """One micro-batch.

    Attributes:
        tokens: int64 [B, T].
        positions: int64 [P], the real positions of the rows with targets, row after row, as indices into
            [B * T].
        targets: those of the P positions, Q in all.
        value_positions: int64 [V], those of critics' rows.
        spans: each row's (start, stop) in Q, or V.
        inputs: each row's other loss inputs, in their own shape, on the device.
    """

    tokens: Tensor
    positions: Tensor
    targets: Targets
    value_positions: Tensor
    spans: list[tuple[int, int]]
    inputs: list[dict[str, Tensor]]


def collate(rows: Sequence[Row], device: str) -> Collated:
    """The batch of `rows`, at least one, which passed `loss_schema.check_datum`."""
    lengths = [row.length for row in rows]
    longest = max(lengths)
    scored = sum(row.length for row in rows if TARGETS in row.loss_inputs)
    tokens = np.zeros((len(rows), longest), dtype=np.int64)
    targets: list[np.ndarray] = [np.zeros(0, dtype=np.int64)]
    runs: list[tuple[int, int]] = []
    positions = np.zeros(scored, dtype=np.int64)
    value_positions = np.zeros(sum(lengths) - scored, dtype=np.int64)
    spans: list[tuple[int, int]] = []
    start, target_start, value_start = 0, 0, 0
    for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        tokens[number, :length] = np.frombuffer(row.tokens, DTYPES["int32"].numpy)
        real = np.arange(length, dtype=np.int64) + number * longest
        if TARGETS in row.loss_inputs:
            row_targets = row.loss_inputs[TARGETS].values().ravel()
            targets.append(row_targets)
            runs.append((length, row_targets.size // length))
            positions[start : start + length] = real
            spans.append((target_start, target_start + row_targets.size))
            start, target_start = start + length, target_start + row_targets.size
        else:
            value_positions[value_start : value_start + length] = real
            spans.append((value_start, value_start + length))
            value_start += length
    return Collated(
        tokens=torch.from_numpy(tokens).to(device),
        positions=torch.from_numpy(positions).to(device),
        targets=Targets(torch.from_numpy(np.concatenate(targets)).to(device), widths_of(runs)),
        value_positions=torch.from_numpy(value_positions).to(device),
        spans=spans,
        inputs=_loss_inputs(rows, device),
    )


def idle_batch(device: str) -> Collated:
    """One masked position, for a rank that has to take part in a collective pass without any row."""
    zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
    return Collated(zero, zero[0], Targets(zero[0], ((1, 1),)), zero[0, :0], [], [])


def row_output(logprobs: Tensor, values: Tensor, batch: Collated, number: int, row: Row) -> Tensor:
    """A row's part of what the model computed: log-probabilities in the shape of its targets, or values.

    Args:
        logprobs: [Q].
        values: [V].
        number: the row's place in the batch.
    """
    start, stop = batch.spans[number]
    if TARGETS not in row.loss_inputs:
        return values[start:stop]
    return logprobs[start:stop].view(row.loss_inputs[TARGETS].shape)


def row_results(
    rows: Sequence[Row],
    names: Sequence[str],
    logprobs: Tensor,
    values: Tensor,
    batch: Collated,
    parts: Sequence[Mapping[str, Tensor]],
) -> list[RowResult]:
    """What each row came to.

    Args:
        names: what each row's output is called.
        parts: each row's parts of the metrics.
    """
    on_host = logprobs.cpu(), values.cpu()
    outputs = [
        from_values(row_output(*on_host, batch, number, row).numpy()) for number, row in enumerate(rows)
    ]
    return [
        RowResult(row.op, row.index, {name: output}, metrics)
        for row, name, output, metrics in zip(rows, names, outputs, metric_values(parts), strict=True)
    ]


def with_dtype(tensors: Mapping[str, HostTensor], dtype: str) -> dict[str, HostTensor]:
    """Float32 host arrays as "float32" or, rounded to nearest even, "bfloat16"."""
    if dtype == "float32":
        return dict(tensors)
    result = {}
    for name, array in tensors.items():
        rounded = torch.from_numpy(array.values().copy()).to(torch.bfloat16)
        result[name] = HostTensor("bfloat16", array.shape, rounded.view(torch.int16).numpy().tobytes())
    return result


def _loss_inputs(rows: Sequence[Row], device: str) -> list[dict[str, Tensor]]:
    """Every row's inputs; one transfer to the device per input name, not per row."""
    result: list[dict[str, Tensor]] = [{} for _ in rows]
    for name in sorted({name for row in rows for name in row.loss_inputs} - {TARGETS}):
        owners = [number for number, row in enumerate(rows) if name in row.loss_inputs]
        arrays = [rows[number].loss_inputs[name].values() for number in owners]
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
