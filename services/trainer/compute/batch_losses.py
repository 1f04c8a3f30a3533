"""What a micro-batch comes to: the losses of all its rows, one call per loss, and the rows' results.

Invariant: a row's loss and metrics are those of the row alone, whatever it is computed beside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.common.contract.tensors import from_values
from services.trainer.compute.collate import Collated, row_output
from services.trainer.compute.data import PassOp, Row, RowResult
from services.trainer.compute.losses import LOSS_SUM, LOSSES, Datums, Loss, Parts


@dataclass(frozen=True)
class _Group:
    """Rows of one loss.

    Attributes:
        numbers: the rows' places in the batch.
        losses: float64, of each of them.
        parts: of their metrics.
    """

    numbers: list[int]
    losses: Tensor
    parts: Parts


class BatchLosses:
    """The losses of a micro-batch.

    Args:
        ops: what the rows belong to.
        rows: of `batch`, in its order.
        logprobs: float32 [Q], and
        values: float32 [T - P], as `BaseModel.score` gives them.
        device: where both are.
    """

    def __init__(
        self,
        ops: Sequence[PassOp],
        rows: Sequence[Row],
        batch: Collated,
        logprobs: Tensor,
        values: Tensor,
        device: str,
    ) -> None:
        self._rows, self._batch = rows, batch
        self._outputs = (logprobs, values)
        self._losses = [LOSSES[ops[row.op].loss_fn] for row in rows]
        by_loss: dict[str, list[int]] = {}
        for number, loss in enumerate(self._losses):
            by_loss.setdefault(loss.name, []).append(number)
        self._groups = [self._group(LOSSES[name], numbers, ops, device) for name, numbers in by_loss.items()]

    def total(self, *, collective: bool) -> Tensor:
        """Their sum, differentiable: float32.

        Args:
            collective: all ranks go through the whole graph alike, with whatever rows, or none.
        """
        zeros = [(output * 0).sum()[None] for output in self._outputs] if collective else []
        return torch.cat([*zeros, *(group.losses for group in self._groups)]).sum().float()

    def results(self) -> list[RowResult]:
        """What each row came to; waits for the device."""
        logprobs, values = (output.detach().cpu() for output in self._outputs)
        metrics = self._metrics()
        results = []
        for number, (row, loss) in enumerate(zip(self._rows, self._losses, strict=True)):
            output = row_output(logprobs, values, self._batch, number, row)
            results.append(
                RowResult(row.op, row.index, {loss.output: from_values(output.numpy())}, metrics[number])
            )
        return results

    def _group(self, loss: Loss, numbers: list[int], ops: Sequence[PassOp], device: str) -> _Group:
        rows = [self._rows[number] for number in numbers]
        completed = [
            loss.complete(
                {name: array.values() for name, array in row.loss_inputs.items()}, ops[row.op].loss_config
            )
            for row in rows
        ]
        places = [self._batch.places[number] for number in numbers]
        datums = Datums.of([len(place) for place in places], device)
        outputs = _taken(self._outputs[0 if loss.output == "logprobs" else 1], torch.cat(places))
        losses, parts = loss.compute(outputs, _on_device(completed, device), datums)
        return _Group(numbers, losses, parts)

    def _metrics(self) -> list[dict[str, float]]:
        """Of each row, in one transfer from the device."""
        names = [[LOSS_SUM, *group.parts] for group in self._groups]
        columns = [
            column.detach() for group in self._groups for column in (group.losses, *group.parts.values())
        ]
        found = iter(torch.cat(columns).tolist() if columns else [])
        metrics: list[dict[str, float]] = [{} for _ in self._rows]
        for group, named in zip(self._groups, names, strict=True):
            for name in named:
                for number in group.numbers:
                    metrics[number][name] = next(found)
        return metrics


def _taken(outputs: Tensor, places: Tensor) -> Tensor:
    """The outputs at these places; the tensor itself when that is all of them in order."""
    if torch.equal(places, torch.arange(outputs.shape[0])):
        return outputs
    return outputs.index_select(0, places.to(outputs.device))


def _on_device(completed: Sequence[Mapping[str, np.ndarray]], device: str) -> dict[str, Tensor]:
    """The inputs of datums one after the other; one transfer per name, not per datum."""
    return {
        name: torch.from_numpy(np.concatenate([inputs[name] for inputs in completed])).to(device)
        for name in completed[0]
    }
