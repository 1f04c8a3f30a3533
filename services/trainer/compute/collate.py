"""Turns rows of host bytes into the tensors of one micro-batch, and results back into host bytes.

Invariant: a micro-batch is one run of tokens, its rows' sequences end to end, and nothing else. A row without
targets is a critic's: its positions have values, the others' have log-probabilities of targets. Critics' rows
come last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.common.contract.loss_schema import TARGETS
from services.common.contract.tensors import DTYPES, HostTensor, from_values
from services.trainer.compute.attention import Sequences
from services.trainer.compute.data import Row, RowResult
from services.trainer.compute.logprobs import Targets, widths_of


@dataclass(frozen=True)
class Collated:
    """One micro-batch.

    Attributes:
        tokens: int64 [1, T].
        targets: those of the first P tokens, Q in all. The other T - P tokens are critics'.
        sequences: how the rows share T.
        spans: each row's (start, stop) in Q, or in T - P.
        inputs: each row's other loss inputs, in their own shape, on the device.
    """

    tokens: Tensor
    targets: Targets
    sequences: Sequences
    spans: list[tuple[int, int]]
    inputs: list[dict[str, Tensor]]


def in_order(rows: Iterable[Row]) -> list[Row]:
    """Rows as a batch wants them: by operation and index, critics' last."""
    return sorted(rows, key=lambda row: (TARGETS not in row.loss_inputs, row.op, row.index))


def collate(rows: Sequence[Row], device: str) -> Collated:
    """The batch of `rows`, at least one, `in_order`, which passed `loss_schema.check_datum`."""
    lengths = [row.length for row in rows]
    tokens = np.concatenate([np.frombuffer(row.tokens, DTYPES["int32"].numpy) for row in rows])
    targets: list[np.ndarray] = [np.zeros(0, dtype=np.int64)]
    widths: list[tuple[int, int]] = []
    spans: list[tuple[int, int]] = []
    start = value_start = 0
    for row in rows:
        if TARGETS in row.loss_inputs:
            row_targets = row.loss_inputs[TARGETS].values().ravel()
            targets.append(row_targets)
            widths.append((row.length, row_targets.size // row.length))
            spans.append((start, start + row_targets.size))
            start += row_targets.size
        else:
            spans.append((value_start, value_start + row.length))
            value_start += row.length
    return Collated(
        tokens=torch.from_numpy(tokens.astype(np.int64))[None].to(device),
        targets=Targets(torch.from_numpy(np.concatenate(targets)).to(device), widths_of(widths)),
        sequences=Sequences.of(lengths, device),
        spans=spans,
        inputs=_loss_inputs(rows, device),
    )


def idle_batch(device: str) -> Collated:
    """One masked position, for a rank that has to take part in a collective pass without any row."""
    zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
    return Collated(zero, Targets(zero[0], ((1, 1),)), Sequences.of([1], device), [], [])


def row_output(logprobs: Tensor, values: Tensor, batch: Collated, number: int, row: Row) -> Tensor:
    """A row's part of what the model computed: log-probabilities in the shape of its targets, or values.

    Args:
        logprobs: [P, K].
        values: [T - P].
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
