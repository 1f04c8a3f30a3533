"""Turns rows of host bytes into the tensors of one micro-batch, and its outputs back into those of rows.

Invariant: a micro-batch is one run of tokens, its rows' sequences end to end, and nothing else; what rows of
one operation begin with alike may be there once. A row without targets is a critic's: its positions have
values, the others' have log-probabilities of targets. Critics' rows come last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch
from torch import Tensor, nn

from services.common.contract.experts.routing import ids_of
from services.common.contract.loss_schema import TARGETS
from services.trainer.compute.attention import Sequences
from services.trainer.compute.data import Row
from services.trainer.compute.logprobs import Targets
from services.trainer.compute.memory.transfer import on_device
from services.trainer.compute.prefix.layout import Layout, lay_out
from services.trainer.compute.replay.routers import OWN
from services.trainer.compute.split.exchange import Exchange
from services.trainer.compute.split.share import Share
from services.trainer.order.prefixes import PrefixTree, shared_tree, told_apart, unshared


@dataclass(frozen=True)
class Collated:
    """One micro-batch.

    Attributes:
        tokens: int64 [1, T].
        targets: those of the first P tokens, Q in all; a token that several rows have has each row's. The
            other T - P tokens are critics'.
        sequences: how the rows share T.
        places: of each row where its outputs are among the Q, or the T - P: int64, on the host.
        ops: the operations in order, and how many of the T tokens each has.
        chosen: int32 [T, layers, top_k], the experts that tokens are given, -1 = the model's own choice; None
            = no token is given any.
    """

    tokens: Tensor
    targets: Targets
    sequences: Sequences
    places: list[Tensor]
    ops: list[tuple[int, int]]
    chosen: Tensor | None = None

    def part(self, share: Share, exchange: Exchange) -> Collated:
        """What a rank computes of one row, which is all that is here: its tokens, and the targets that they
        predict. What fills it up predicts nothing, or has values that nobody asked for.

        Its `places` are nowhere: what the ranks came to is to be put together first.
        """
        tokens = nn.functional.pad(self.tokens[:, share.start : share.stop], (0, share.filled))
        targets = self.targets
        if targets.positions:
            targets = targets[share.start : share.stop]
            targets = replace(targets, widths=(*targets.widths, *[(share.filled, 0)] * (share.filled > 0)))
        sequences = Sequences.part(share, exchange, str(tokens.device))
        chosen = self.chosen
        if chosen is not None:
            # What fills it up is chosen for as ever.
            filled = (0, 0, 0, 0, 0, share.filled)
            chosen = nn.functional.pad(chosen[share.start : share.stop], filled, value=OWN)
        return Collated(tokens, targets, sequences, [], [(self.ops[0][0], share.size)], chosen)

    def outputs(self, share: Share) -> tuple[int, int]:
        """How many log-probabilities, and values, a rank's part of the one row has."""
        if self.targets.positions:
            return self.targets[share.start : share.stop].ids.numel(), 0
        return 0, share.stop - share.start


def smaller(rows: Sequence[Row], *, in_halves: bool) -> list[Sequence[Row]]:
    """What a micro-batch that could not be computed is tried again in: halves, or the rows of each operation
    by themselves. One part: it is as small as that already."""
    if in_halves:
        middle = len(rows) // 2
        return [part for part in (rows[:middle], rows[middle:]) if part]
    of_operations: dict[int, list[Row]] = {}
    for row in rows:
        of_operations.setdefault(row.op, []).append(row)
    return list(of_operations.values())


def in_order(rows: Iterable[Row]) -> list[Row]:
    """Rows as a batch wants them: by operation and index, critics' last."""
    return sorted(rows, key=lambda row: (TARGETS not in row.loss_inputs, row.op, row.index))


def collate(rows: Sequence[Row], device: str, *, shared: bool) -> Collated:
    """The batch of `rows`, at least one, `in_order`, which passed `loss_schema.check_datum`.

    Args:
        shared: prefixes that rows of one operation share are there once, where that is worth it.
    """
    ops, groups = _groups(rows, shared)
    layout = lay_out(groups)
    scored = [number for number, row in enumerate(rows) if TARGETS in row.loss_inputs]
    targets, places = _targets([(rows[number], layout.places[number]) for number in scored], device)
    first = int(layout.places[len(scored)][0]) if len(scored) < len(rows) else 0
    return Collated(
        tokens=on_device(torch.from_numpy(layout.tokens)[None], device),
        targets=targets,
        sequences=Sequences.laid_out(layout, device),
        places=places + [torch.from_numpy(place - first) for place in layout.places[len(scored) :]],
        ops=list(zip(ops, layout.groups, strict=True)),
        chosen=_chosen(rows, layout, device),
    )


def computed_tokens(rows: Sequence[Row], *, shared: bool) -> int:
    """Tokens of the batch that `collate` makes of rows."""
    return sum(tree.tokens for _, tree in _groups(rows, shared)[1])


def _groups(rows: Sequence[Row], shared: bool) -> tuple[list[int], list[tuple[list[bytes], PrefixTree]]]:
    """The operations of rows, and of each its sequences and their tree."""
    cut = shared_tree if shared else unshared
    ops: list[int] = []
    groups: list[tuple[list[bytes], PrefixTree]] = []
    for op, group in groupby(rows, key=lambda row: row.op):
        same = list(group)
        sequences = [row.tokens for row in same]
        ops.append(op)
        tree = cut(told_apart(sequences, [ids_of(row.routed) for row in same]))
        groups.append((sequences, tree))
    return ops, groups


def _chosen(rows: Sequence[Row], layout: Layout, device: str) -> Tensor | None:
    """What tokens that several rows have are given is the same in all of these."""
    given = [(row.routed, place) for row, place in zip(rows, layout.places, strict=True) if row.routed]
    if not given:
        return None
    chosen = np.full((len(layout.tokens), *given[0][0].shape[1:]), OWN, dtype=np.int32)
    for routed, place in given:
        chosen[place] = routed.values()
    return on_device(torch.from_numpy(chosen), device)


def _targets(rows: Sequence[tuple[Row, np.ndarray]], device: str) -> tuple[Targets, list[Tensor]]:
    """The targets of rows in the order of the tokens that predict them, and where each row's are.

    Args:
        rows: with where the tokens of each are.
    """
    nothing = np.zeros(0, dtype=np.int64)
    ids, tokens, counts = [nothing], [nothing], []
    for row, place in rows:
        mine = row.loss_inputs[TARGETS].values().ravel()
        ids.append(mine)
        tokens.append(place.repeat(mine.size // row.length))
        counts.append(mine.size)
    of_token = np.concatenate(tokens)
    order = np.argsort(of_token, kind="stable")
    places = np.empty_like(order)
    places[order] = np.arange(order.size)
    widths = np.bincount(of_token)
    # Where the number of targets changes, a run begins.
    begins = np.flatnonzero(np.diff(widths, prepend=-1))
    runs = zip(np.diff(begins, append=widths.size).tolist(), widths[begins].tolist(), strict=True)
    targets = Targets(on_device(torch.from_numpy(np.concatenate(ids)[order]), device), tuple(runs))
    return targets, list(torch.from_numpy(places).split(counts)) if counts else []


def idle_batch(device: str) -> Collated:
    """One masked position, for a rank that has to take part in a collective pass without any row."""
    zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
    return Collated(zero, Targets(zero[0], ((1, 1),)), Sequences.of([1], device), [], [])


def row_output(logprobs: Tensor, values: Tensor, batch: Collated, number: int, row: Row) -> Tensor:
    """A row's part of what the model computed: log-probabilities in the shape of its targets, or values.

    Args:
        logprobs: [Q], on the host.
        values: [T - P], on the host.
        number: the row's place in the batch.
    """
    if TARGETS not in row.loss_inputs:
        return values[batch.places[number]]
    return logprobs[batch.places[number]].view(row.loss_inputs[TARGETS].shape)
