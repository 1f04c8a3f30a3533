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
from services.trainer.compute.memory.transfer import ToHost, on_device


@dataclass(frozen=True)
class _Group:
    """Rows of one loss.

    Attributes:
        numbers: the rows' places in the batch.
        places: of their outputs in those of the batch, int64 [q], on the host; `at`: on the device, None when
            they are all of them in order.
        inputs: see `Loss.compute`.
    """

    loss: Loss
    numbers: list[int]
    places: Tensor
    at: Tensor | None
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
                mine = on_device(order[low:high], str(logprobs.device))
                at = on_device(places[low:high] - where.start, str(logprobs.device))
                given = logprobs[at].requires_grad_()
                inputs = {name: values[mine] for name, values in group.inputs.items()}
                datums = Datums.of([high - low], str(logprobs.device))
                loss, _ = group.loss.compute(given, inputs, datums)
                (slopes[at],) = torch.autograd.grad(loss.sum(), given)
            return slopes

        return of

    def compute(self, logprobs: Tensor, values: Tensor) -> Computed:
        """Computes the losses.

        Args:
            logprobs: float32 [Q], and
            values: float32 [T - P], as `BaseModel.score` gives them.
        """
        computed = [
            group.loss.compute(
                _taken(logprobs if group.loss.output == "logprobs" else values, group.at),
                group.inputs,
                group.datums,
            )
            for group in self._groups
        ]
        numbers = [group.numbers for group in self._groups]
        losses = [loss.output for loss in self._losses]
        return Computed(self._rows, self._batch, losses, numbers, (logprobs, values), computed)

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
        where, batch = torch.cat(places), self._batch
        scored = loss.output == "logprobs"
        whole = batch.targets.ids.numel() if scored else batch.tokens.numel() - batch.targets.positions
        in_order = torch.equal(where, torch.arange(whole))
        at = None if in_order else on_device(where, device)
        return _Group(loss, numbers, where, at, _inputs(completed, device), datums)


@dataclass(frozen=True)
class Computed:
    """The losses of a micro-batch, with their graph.

    Attributes:
        losses: what each row's model computes for its loss.
        numbers: of each loss the places in the batch of its rows.
        outputs: of the model.
        computed: of each loss, as `Loss.compute`.
    """

    rows: Sequence[Row]
    batch: Collated
    losses: Sequence[str]
    numbers: Sequence[list[int]]
    outputs: tuple[Tensor, Tensor]
    computed: Sequence[tuple[Tensor, Mapping[str, Tensor]]]

    def total(self, *, collective: bool) -> Tensor:
        """Their sum, differentiable: float32.

        Args:
            collective: all ranks go through the whole graph alike, with whatever rows, or none.
        """
        zeros = [(output * 0).sum()[None] for output in self.outputs] if collective else []
        return torch.cat([*zeros, *(losses for losses, _ in self.computed)]).sum().float()

    def leave(self) -> Leaving:
        """Has what the rows came to copied to the host, without the graph."""
        columns = [column for losses, parts in self.computed for column in (losses, *parts.values())]
        metrics = torch.cat(columns) if columns else self.outputs[0].new_zeros(0)
        names = [[LOSS_SUM, *parts] for _, parts in self.computed]
        copies = ToHost([*self.outputs, metrics])
        named = list(zip(self.numbers, names, strict=True))
        return Leaving(self.rows, self.batch, self.losses, named, copies)


@dataclass(frozen=True)
class Leaving:
    """What the rows of a micro-batch came to, on its way to the host.

    Attributes:
        losses: what each row's model computes for its loss.
        names: of each loss the rows' places in the batch, and the metrics that each has.
    """

    rows: Sequence[Row]
    batch: Collated
    losses: Sequence[str]
    names: Sequence[tuple[list[int], list[str]]]
    copies: ToHost

    def results(self) -> list[RowResult]:
        """Waits for the device."""
        logprobs, values, columns = self.copies.wait()
        metrics = self._metrics(columns)
        results = []
        for number, (row, name) in enumerate(zip(self.rows, self.losses, strict=True)):
            output = row_output(logprobs, values, self.batch, number, row)
            results.append(RowResult(row.op, row.index, {name: from_values(output.numpy())}, metrics[number]))
        return results

    def _metrics(self, columns: Tensor) -> list[dict[str, float]]:
        found = iter(columns.tolist())
        metrics: list[dict[str, float]] = [{} for _ in self.rows]
        for numbers, names in self.names:
            for name in names:
                for number in numbers:
                    metrics[number][name] = next(found)
        return metrics


def _taken(outputs: Tensor, at: Tensor | None) -> Tensor:
    return outputs if at is None else outputs.index_select(0, at)


def _inputs(completed: Sequence[Mapping[str, np.ndarray]], device: str) -> dict[str, Tensor]:
    """The inputs of datums one after the other; one transfer per name, not per datum."""
    return {
        name: on_device(torch.from_numpy(np.concatenate([inputs[name] for inputs in completed])), device)
        for name in completed[0]
    }
