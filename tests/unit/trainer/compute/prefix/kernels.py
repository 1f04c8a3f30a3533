"""A kernel in plain PyTorch, and kernels that are wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from services.trainer.compute.prefix.calls import Run


class Plain:
    """Scores of all pairs, in the precision of what is given."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        runs: tuple[Run, Run],
        causal: bool,
        scale: float,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        scores = self._scores(query, key, runs, causal, scale, window)
        sums = scores.logsumexp(-1)
        shares = (scores - sums[..., None]).exp()
        made = torch.einsum("hqk,khd->qhd", shares, repeated(value, query).float())
        return made.to(query.dtype), sums

    def backward(
        self,
        above: Tensor,
        given: tuple[Tensor, Tensor, Tensor],
        made: tuple[Tensor, Tensor],
        runs: tuple[Run, Run],
        causal: bool,
        scale: float,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = given
        output, sums = made
        shares = (self._scores(query, key, runs, causal, scale, window) - sums[..., None]).exp()
        above, group = above.float(), query.shape[1] // key.shape[1]
        inner = torch.einsum("qhd,khd->hqk", above, repeated(value, query).float())
        slopes = shares * (inner - (above * output.float()).sum(-1).T[..., None]) * scale
        dquery = torch.einsum("hqk,khd->qhd", slopes, repeated(key, query).float())
        dkey = torch.einsum("hqk,qhd->khd", slopes, query.float()).unflatten(1, (-1, group)).sum(2)
        dvalue = torch.einsum("hqk,qhd->khd", shares, above).unflatten(1, (-1, group)).sum(2)
        return dquery.to(query.dtype), dkey.to(key.dtype), dvalue.to(value.dtype)

    @staticmethod
    def _at(run: Run, owner: Tensor) -> Tensor:
        """Each token's place, counted from the end of its sequence."""
        return torch.arange(len(owner)) - run.offsets[1:][owner]

    def _scores(
        self,
        query: Tensor,
        key: Tensor,
        runs: tuple[Run, Run],
        causal: bool,
        scale: float,
        window: int | None,
    ) -> Tensor:
        scores = torch.einsum("qhd,khd->hqk", query.float(), repeated(key, query).float()) * scale
        owners = [
            torch.repeat_interleave(torch.arange(len(run.offsets) - 1), run.offsets.diff()) for run in runs
        ]
        hidden = owners[0][:, None] != owners[1]
        if causal:
            asking, met = (self._at(run, owner) for run, owner in zip(runs, owners, strict=True))
            behind = asking[:, None] - met
            hidden |= behind < 0
            if window is not None:
                hidden |= behind >= window
        return scores.masked_fill(hidden, -torch.inf)


class Wrong(Plain):
    """Takes what was merged for its own."""

    def backward(self, above: Tensor, given: Any, made: Any, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        return super().backward(above, given, self.forward(*given, *rest), *rest)


class NotANumber(Plain):
    """Its gradient of keys is none."""

    def backward(self, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        dquery, dkey, dvalue = super().backward(*given)
        return dquery, dkey * torch.nan, dvalue


class MixesSingleTokens(Plain):
    """Where each sequence asks with one token, as for which kernels have a way of their own, it has the sums
    of one for those of another."""

    def forward(self, *given: Any) -> tuple[Tensor, Tensor]:
        made, sums = super().forward(*given)
        queries, _ = given[3]
        return made, sums if queries.longest > 1 else sums.flip(1)


class LosesManyKeys(Plain):
    """Divides many keys of single tokens among several blocks of threads, and forgets all of them but one."""

    def forward(self, *given: Any) -> tuple[Tensor, Tensor]:
        output, sums = super().forward(*given)
        queries, keys = given[3]
        return output, sums - 1.0 if queries.longest == 1 and keys.longest > 512 else sums


class LosesManyKeysInAWindow(Plain):
    """The same, where there is a window."""

    def forward(self, *given: Any) -> tuple[Tensor, Tensor]:
        output, sums = super().forward(*given)
        queries, keys = given[3]
        loses = given[-1] is not None and queries.longest == 1 and keys.longest > 512
        return output, sums - 1.0 if loses else sums


class SeesOneMore(Plain):
    """Its window has one token too many."""

    def forward(self, *given: Any) -> tuple[Tensor, Tensor]:
        return super().forward(*_with_window(given, 1))

    def backward(self, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        return super().backward(*_with_window(given, 1))


class ForgetsTheWindowOnItsWayBack(Plain):
    def backward(self, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        return super().backward(*given[:-1], None)


class CountsFromTheBegin(Plain):
    """The first of a sequence of queries is the first of its keys."""

    @staticmethod
    def _at(run: Run, owner: Tensor) -> Tensor:
        return torch.arange(len(owner)) - run.offsets[:-1][owner]


class Absent(Plain):
    def forward(self, *given: Any) -> tuple[Tensor, Tensor]:
        raise RuntimeError("no kernel image is available")


def repeated(keys: Tensor, query: Tensor) -> Tensor:
    return keys.repeat_interleave(query.shape[1] // keys.shape[1], dim=1)


def _with_window(given: Sequence[Any], more: int) -> list[Any]:
    *rest, window = given
    return [*rest, None if window is None else window + more]
