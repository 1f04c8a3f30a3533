"""Tokens as a sampler told them: arrays, of which objects are made a few at a time.

Invariant: it is a sequence of tokens that takes 8 bytes for each of them, and for each likely one beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np

from services.gateway.text.generated import Scored, Token

_AT_ONCE = 256


class Told(Sequence[Token]):
    """Tokens with their log-probabilities.

    Args:
        ids: [N].
        logprobs: [N].
        likely: the most likely tokens in each place, most likely first, [N, K].
        likely_logprobs: [N, K].
    """

    def __init__(
        self, ids: np.ndarray, logprobs: np.ndarray, likely: np.ndarray, likely_logprobs: np.ndarray
    ) -> None:
        if not len(ids) == len(logprobs) == len(likely) == len(likely_logprobs):
            raise ValueError("log-probabilities of other tokens")
        self.ids = ids
        self._logprobs = logprobs
        self._likely = likely
        self._likely_logprobs = likely_logprobs

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        return self.ids.nbytes + self._logprobs.nbytes + self._likely.nbytes + self._likely_logprobs.nbytes

    @overload
    def __getitem__(self, place: int) -> Token: ...

    @overload
    def __getitem__(self, place: slice) -> Told: ...

    def __getitem__(self, place: int | slice) -> Token | Told:
        if isinstance(place, slice):
            return Told(
                self.ids[place], self._logprobs[place], self._likely[place], self._likely_logprobs[place]
            )
        (token,) = self[place : place + 1 or None]._tokens()
        return token

    def __iter__(self) -> Iterator[Token]:
        for start in range(0, len(self), _AT_ONCE):
            yield from self[start : start + _AT_ONCE]._tokens()

    def _tokens(self) -> Iterator[Token]:
        rows = zip(self._likely.tolist(), self._likely_logprobs.tolist(), strict=True)
        likely = (tuple(map(Scored, *row)) for row in rows)
        return map(Token, self.ids.tolist(), self._logprobs.tolist(), likely)
