"""How much of a sequence was told to a client, of which what comes later must be the continuation.

Invariant: it takes as much memory for a long sequence as for a short one: of what was told a digest is kept.
"""

from __future__ import annotations

import hashlib
from typing import Any


class Beginning:
    """The tokens of one sequence that were told, as bytes of their ids (int32, little-endian).

    Attributes:
        told: how many bytes.
        differs: a replica that told the sequence anew came to other tokens.
    """

    def __init__(self) -> None:
        self.told = 0
        self.differs = False
        self._digest = hashlib.sha256()
        # Of the run that a replica tells now: behind `told` when a sequence was begun anew.
        self._at = 0
        self._again: Any = None

    def fresh(self, start: int, ids: bytes) -> int:
        """How many of these bytes, the last ones, go on from what was told.

        Args:
            start: bytes of the sequence before them. 0 begins a run; what follows a gap counts for nothing.
        """
        if start == 0:
            self._at, self._again = 0, None
        if start != self._at:
            return 0
        both = min(self.told - start, len(ids))
        if both:
            self._again = self._again or hashlib.sha256()
            self._again.update(ids[:both])
            self._at += both
            self.differs |= self._at == self.told and self._again.digest() != self._digest.digest()
        return 0 if self.differs else len(ids) - both

    def tell(self, ids: bytes) -> None:
        """These are told, after the others."""
        self._digest.update(ids)
        self.told += len(ids)
        self._at = self.told

    def begins(self, ids: bytes) -> bool:
        """Whether a whole sequence begins with what was told."""
        return hashlib.sha256(ids[: self.told]).digest() == self._digest.digest()
