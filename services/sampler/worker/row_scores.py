"""The scores of one prompt while the steps of its prefill compute them, on the device of the logits.

Invariant: every row is scored from hidden states of this very prefill, however that is cut into chunks; what
is not whole gives no answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from services.sampler.worker.prompt_scores import ScorePlan, shapes, uniforms

Rows = npt.NDArray[np.int64]
LogprobsAt = Callable[[torch.Tensor], torch.Tensor]
"""Token ids [rows, n] -> their log-probabilities, float32 [rows, n]."""
LogprobsOf = Callable[[torch.Tensor], LogprobsAt]
"""Logits [rows, vocabulary] -> what tells their log-probabilities."""


def on(device: torch.device, values: npt.NDArray[Any]) -> torch.Tensor:
    """Values of the host on a device. To a GPU they go from page-locked memory: the host does not wait."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class RowScores:
    """What a plan asks for, as far as it is computed.

    Args:
        device: of the logits.
        logprobs_of: how log-probabilities come from logits.
    """

    def __init__(self, plan: ScorePlan, device: torch.device, logprobs_of: LogprobsOf) -> None:
        self._plan = plan
        self._logprobs_of = logprobs_of
        self._needed = plan.needed()
        self._scored = 0
        """Needed rows that are scored, in order."""
        each = shapes(plan)
        sizes = [math.prod(shape) for shape in each]
        self._vector = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        views = [part.view(shape) for part, shape in zip(self._vector.split(sizes), each, strict=True)]
        self._own, self._topk_logprobs = views[0].view(torch.float32), views[2].view(torch.float32)
        self._targets, self._drawn_logprobs = views[3].view(torch.float32), views[5].view(torch.float32)
        self._topk_ids, self._drawn_ids = views[1], views[4]

    def answer(self, stop: int) -> torch.Tensor | None:
        """The answer, once the steps have come to row `stop` - 1 and that ends the prompt. Without all rows
        there is none, and the front end reports an error."""
        done = stop > self._plan.rows and self._scored == self._needed.size
        return self._vector if done else None

    def rows(self, start: int, stop: int) -> Rows:
        """The rows to score of start .. stop - 1, whose hidden states are of this step."""
        first, last = np.searchsorted(self._needed, [start, stop])
        rows = self._needed[first:last]
        if not rows.size or first > self._scored:
            return rows[:0]
        # A prefill that was preempted begins anew.
        self._scored = max(self._scored, int(last))
        return rows

    def fill(self, rows: Rows, next_tokens: torch.Tensor, logits: torch.Tensor) -> None:
        """Writes what the plan wants of `rows` (ascending).

        Args:
            next_tokens: of the prompt, behind each row: int64 [len(rows)].
            logits: [len(rows), vocabulary].
        """
        plan = self._plan
        begin = int(np.searchsorted(rows, plan.first))
        if (plan.own or plan.topk) and begin < rows.size:
            there = on(logits.device, rows[begin:] - plan.first)
            at = self._logprobs_of(logits[begin:])
            if plan.own:
                self._own[there] = at(next_tokens[begin:, None])[:, 0]
            if plan.topk:
                ids = logits[begin:].topk(plan.topk, dim=-1).indices
                self._topk_ids[there] = ids.int()
                self._topk_logprobs[there] = at(ids)
        cells = slice(int(plan.target_starts[rows[0]]), int(plan.target_starts[rows[-1] + 1]))
        if cells.start < cells.stop:
            # Rows between these have no targets, or they would be needed: the cells are contiguous.
            self._fill_targets(rows, cells, logits)
        if plan.draws:
            there, drawn = on(logits.device, rows), _draw(plan, rows, logits)
            self._drawn_ids[there] = drawn.int()
            self._drawn_logprobs[there] = self._logprobs_of(logits)(drawn)

    def _fill_targets(self, rows: Rows, cells: slice, logits: torch.Tensor) -> None:
        counts = self._plan.target_starts[rows + 1] - self._plan.target_starts[rows]
        row = np.repeat(np.arange(rows.size), counts)
        column = np.arange(row.size) - np.repeat(np.cumsum(counts) - counts, counts)
        ids = np.zeros((rows.size, int(counts.max())), dtype=np.int64)
        ids[row, column] = self._plan.target_ids[cells]
        found = self._logprobs_of(logits)(on(logits.device, ids))
        there = on(logits.device, row * ids.shape[1] + column)
        self._targets[cells] = found.flatten()[there]


def _draw(plan: ScorePlan, rows: Rows, logits: torch.Tensor) -> torch.Tensor:
    """Independent draws from softmax(logits / temperature): int64 [len(rows), draws]."""
    if plan.temperature == 0.0:
        return logits.argmax(dim=-1, keepdim=True).repeat(1, plan.draws)
    cumulative = (logits.float() / plan.temperature).softmax(dim=-1).double().cumsum(dim=-1)
    points = on(logits.device, uniforms(plan.seed, rows, plan.draws))
    # The first token whose cumulative probability exceeds the point; never one of probability 0.
    drawn = torch.searchsorted(cumulative, points * cumulative[:, -1:], right=True)
    return drawn.clamp(max=logits.shape[-1] - 1)
