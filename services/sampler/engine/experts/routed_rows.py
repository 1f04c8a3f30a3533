"""The experts of a request's tokens on their way from the workers to the front end. Pure.

Workers tell of each step the rows of the tokens that it computed. A step may make no token (of a long prompt
it computes a part), compute drafts that do not hold, or compute tokens again after vLLM gave a sequence up
for another; what a request has for its tokens leaves with them.

Invariant: what has left is, row by row, what made the tokens that the request is told with it; nothing leaves
of tokens between which one is missing.
"""

from __future__ import annotations

import numpy as np


class RoutedRows:
    """Rows [n, layers, top_k] of one request."""

    def __init__(self) -> None:
        self._left = 0
        self._rows: np.ndarray | None = None
        self._broken = False

    def add(self, start: int, rows: np.ndarray) -> None:
        """The rows of the tokens from place `start` on, of one step. They replace what was there of these and
        of later tokens, as far as it has not left."""
        known = self._left if self._rows is None else self._left + len(self._rows)
        if start > known:
            self._broken = True
            return
        fresh = rows[max(0, self._left - start) :]
        kept = None if self._rows is None else self._rows[: max(0, start - self._left)]
        self._rows = fresh if kept is None or not len(kept) else np.concatenate([kept, fresh])

    def take(self, stop: int) -> np.ndarray | None:
        """What has not left of the tokens before place `stop`; None: nothing, or not all of it."""
        count = stop - self._left
        if self._broken or self._rows is None or not 0 < count <= len(self._rows):
            return None
        taken, self._rows = self._rows[:count], self._rows[count:]
        self._left = stop
        return taken
