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
from services.trainer.compute.logprobs import Slope
from services.trainer.compute.losses import LOSS_SUM, LOSSES, Datums, Loss


@dataclass(frozen=True)
class _Group:
    """Rows of one loss.

    Attributes:
        numbers: the rows' places in the batch.
        places: of their outputs in those of the batch, int64 [q], on the host.
        inputs: see `Loss.compute`.
    """

    loss: Loss
    numbers: list[int]
    places: Tensor
    inputs: dict[str, Tensor]
    datums: Datums


class BatchLosses:
    """The losses of a micro-batch.

    Args:
        ops: what the rows belong to.
        rows: of `batch`, in its order.
        device: where the model's outputs are.
    """

    def __init__(self, ops: Sequence[PassOp], rows: Sequence[Row], batch: Collated, device: str) -> None:
        self._rows, self._batch = rows, batch
        self._losses = [LOSSES[ops[row.op].loss_fn] for row in rows]
        by_loss: dict[str, list[int]] = {}
        for number, loss in enumerate(self._losses):
            by_loss.setdefault(loss.name, []).append(number)
        self._groups = [self._group(LOSSES[name], numbers, ops, device) for name, numbers in by_loss.items()]

    def slope(self) -> Slope | None:
        """The derivative of `total` by log-probabilities; None if it depends on more than each alone."""
        groups = [group for group in self._groups if group.loss.output == "logprobs"]
        if not all(group.loss.by_output for group in groups):
            return None
        ordered = [(group, *group.places.sort()) for group in groups]

        def of(logprobs: Tensor, where: slice) -> Tensor:
            slopes = torch.zeros_like(logprobs)
            bounds = torch.tensor([where.start, where.stop])
            for group, places, order in ordered:
                low, high = torch.searchsorted(places, bounds).tolist()
                if low == high:
                    continue
                mine = order[low:high].to(logprobs.device)
                at = (places[low:high] - where.start).to(logprobs.device)
                given = logprobs[at].requires_grad_()
                inputs = {name: values[mine] for name, values in group.inputs.items()}
                datums = Datums.of([high - low], str(logprobs.device))
                loss, _ = group.loss.compute(given, inputs, datums)
                (slopes[at],) = torch.autograd.grad(loss.sum(), given)
            return slopes

        return of

    def take(self, logprobs: Tensor, values: Tensor) -> None:
        """Computes the losses.

        Args:
            logprobs: float32 [Q], and
            values: float32 [T - P], as `BaseModel.score` gives them.
        """
        self._outputs = (logprobs, values)
        self._computed = [
            group.loss.compute(
                _taken(logprobs if group.loss.output == "logprobs" else values, group.places),
                group.inputs,
                group.datums,
            )
            for group in self._groups
        ]

    def total(self, *, collective: bool) -> Tensor:
        """Their sum, differentiable: float32.

        Args:
            collective: all ranks go through the whole graph alike, with whatever rows, or none.
        """
        zeros = [(output * 0).sum()[None] for output in self._outputs] if collective else []
        return torch.cat([*zeros, *(losses for losses, _ in self._computed)]).sum().float()

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
        return _Group(loss, numbers, torch.cat(places), _on_device(completed, device), datums)

    def _metrics(self) -> list[dict[str, float]]:
        """Of each row, in one transfer from the device."""
        names = [[LOSS_SUM, *parts] for _, parts in self._computed]
        columns = [
            column.detach() for losses, parts in self._computed for column in (losses, *parts.values())
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
