"""Which tokens of a flat batch meet which, in calls of a kernel that knows sequences end to end.

Without a window every piece meets itself in one call for all of them; then the tokens below pieces that
others continue meet those pieces, in a call for all pieces that have as many above them, and what the calls
come to is merged. A kernel has one window for all sequences of a call, counted from the end of both, so with
a window a piece meets at once what it sees: the tokens above it that its first one sees are gathered before
its own.

Invariant: a token meets each one that it sees in one call, and no other token in any. Those who ask in causal
calls are the flat batch, in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from services.trainer.compute.memory.transfer import on_device
from services.trainer.compute.prefix.layout import Place, Trees, tails, tokens_of

FEW_KEYS, MOST_KEYS = 1 << 11, 1 << 14
"""That a call gathers: as many as there are tokens, so that it takes no more than one of sequences does, but
not less and not more than these. Many short answers to a long prompt would otherwise have as many copies of a
window of it at once."""
MOST_PIECES = 256
"""Of a causal call: the kernel's backward pass has sums for 128 tokens more of each, 2 MiB with 32 heads of
128."""


class Run(NamedTuple):
    """Sequences end to end.

    Attributes:
        offsets: int32 [sequences + 1], where each begins, and the end; on the device.
        longest: tokens.
    """

    offsets: Tensor
    longest: int


@dataclass(frozen=True)
class Call:
    """Tokens that ask, and those that they meet.

    Attributes:
        asking, met: their places in the flat batch; int64, or a run of them.
        queries, keys: the same as sequences, one of each for a piece.
        causal: each meets those up to itself, where the last of a sequence of queries is the last of its
            keys; else all.
    """

    asking: Tensor | slice
    met: Tensor | slice
    queries: Run
    keys: Run
    causal: bool = True

    @property
    def runs(self) -> tuple[Run, Run]:
        """The sequences of queries, and those of keys."""
        return self.queries, self.keys


def of_themselves(lengths: Sequence[int], offsets: Tensor, device: str) -> tuple[Call, ...]:
    """Every piece meets itself.

    Args:
        offsets: as of `Run`, of all pieces.
    """
    if len(lengths) <= MOST_PIECES:
        own = Run(offsets, max(lengths))
        return (Call(slice(None), slice(None), own, own),)
    pieces, calls = list(pairwise(accumulate(lengths, initial=0))), []
    for first in range(0, len(pieces), MOST_PIECES):
        some = pieces[first : first + MOST_PIECES]
        tokens, own = _tokens(some, device), _run(some, device)
        calls.append(Call(tokens, tokens, own, own))
    return tuple(calls)


def levels_of(lengths: Sequence[int], trees: Trees, device: str) -> tuple[Call, ...]:
    """What is below pieces that others continue meets these, by how many are above them."""
    starts = list(accumulate(lengths, initial=0))
    levels: list[list[tuple[int, int, int]]] = []
    for first, tree in trees:
        above: list[int] = []
        for start, stop, end in (tuple(starts[first] + place for place in seen) for seen in tree.seen):
            while above and above[-1] <= start:
                above.pop()
            levels += [[]] if len(above) == len(levels) else []
            levels[len(above)].append((start, stop, end))
            above.append(end)
    return tuple(_level(places, device) for places in levels)


def _level(places: Sequence[tuple[int, int, int]], device: str) -> Call:
    below = [(stop, end) for _, stop, end in places]
    piece = [(start, stop) for start, stop, _ in places]
    return Call(
        _tokens(below, device), _tokens(piece, device), _run(below, device), _run(piece, device), causal=False
    )


def within_window(
    window: int, lengths: Sequence[int], trees: Trees, device: str, most_keys: int = MOST_KEYS
) -> tuple[Call, ...]:
    """Every piece meets what it sees through a window.

    Args:
        window: tokens that each sees, itself included.
        most_keys: that a call gathers, unless one piece alone sees more.
    """
    pieces = list(pairwise(accumulate(lengths, initial=0)))
    seen = [[*above, own] for above, own in zip(tails(window - 1, lengths, trees), pieces, strict=True)]
    sizes = [sum(stop - start for start, stop in places) for places in seen]
    calls = []
    for first, after in _batches(sizes, min(most_keys, max(sum(lengths), FEW_KEYS))):
        asking = pieces[first:after]
        met = [place for places in seen[first:after] for place in places]
        keys = Run(_offsets(sizes[first:after], device), max(sizes[first:after]))
        calls.append(Call(_tokens(asking, device), _tokens(met, device), _run(asking, device), keys))
    return tuple(calls)


def _batches(sizes: Sequence[int], most: int) -> Iterator[Place]:
    """Neighbours that are gathered together."""
    first = total = 0
    for number, size in enumerate(sizes):
        if total and (total + size > most or number - first == MOST_PIECES):
            yield first, number
            first, total = number, 0
        total += size
    yield first, len(sizes)


def _tokens(runs: Sequence[Place], device: str) -> Tensor | slice:
    """Those of runs. Where they are one, nothing has to be gathered."""
    if all(one[1] == next_[0] for one, next_ in pairwise(runs)):
        return slice(runs[0][0], runs[-1][1])
    return on_device(tokens_of(runs), device)


def _run(runs: Sequence[Place], device: str) -> Run:
    sizes = [stop - start for start, stop in runs]
    return Run(_offsets(sizes, device), max(sizes))


def _offsets(sizes: Sequence[int], device: str) -> Tensor:
    return on_device(torch.tensor([0, *accumulate(sizes)], dtype=torch.int32), device)
