"""The rows of prompts that one step scores, with either of vLLM's model runners.

Those of all requests go through the output head end to end. vLLM waits for the GPU whenever adapters are
mapped, and all that the step decodes waits with it, so they are mapped once for all rows that are held at
once, and not for each request.

Invariant: every row is scored with the adapter of its own request, whatever else is in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from services.sampler.worker.adapter_rows import adapter_rows
from services.sampler.worker.row_scores import Rows, RowScores, on

CELLS = 2**25
"""Of the logits held at once: 128 MiB of float32."""


class Part(NamedTuple):
    """What a step scores of one request."""

    scores: RowScores
    rows: Rows
    """Ascending."""
    offset: int
    """From a row to its hidden state in the step."""
    adapter: int
    """Its id; 0 = none."""
    next_tokens: Callable[[Rows], torch.Tensor]
    """Rows -> the prompt's tokens behind them, int64 [rows]."""


def score(
    runner: Any,
    parts: Iterable[Part],
    hidden_states: torch.Tensor,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    vocabulary: int,
) -> None:
    """Fills in the scores of a step.

    Args:
        runner: vLLM's model runner, of either kind, in the step.
        hidden_states: of the step's tokens [tokens, width].
        logits_of: hidden states [rows, width] -> logits [rows, vocabulary].
    """
    with adapter_rows(runner) as use:
        for batch in batches(parts, max(1, CELLS // vocabulary)):
            counts = [part.rows.size for part in batch]
            use(np.repeat([part.adapter for part in batch], counts).tolist())
            there = on(hidden_states.device, np.concatenate([part.rows + part.offset for part in batch]))
            logits = logits_of(hidden_states[there])
            for part, mine in zip(batch, logits.split(counts), strict=True):
                part.scores.fill(part.rows, part.next_tokens(part.rows), mine)


def batches(parts: Iterable[Part], most: int) -> Iterator[list[Part]]:
    """The parts in order, cut so that no batch has more than `most` rows."""
    batch, room = [], most
    for part in parts:
        rows = part.rows
        while rows.size:
            taken, rows = rows[:room], rows[room:]
            batch.append(part._replace(rows=taken))
            room -= taken.size
            if not room:
                yield batch
                batch, room = [], most
    if batch:
        yield batch
