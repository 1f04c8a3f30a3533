"""Which part of a sequence each rank has. Pure.

Invariant: the parts follow each other without a gap, and every rank computes equally many tokens, as an
exchange of equal parts needs: what the last ranks lack is filled up behind the end, where causal attention
lets no token of the sequence see it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    """One rank's part of a sequence.

    Attributes:
        rank: whose; of so many `ranks`.
        whole: tokens of the sequence, at least 1.
    """

    rank: int
    ranks: int
    whole: int

    @property
    def size(self) -> int:
        """Tokens that each rank computes."""
        return -(-self.whole // self.ranks)

    @property
    def start(self) -> int:
        """Of the sequence's tokens the first one that the rank has; their number where it has none."""
        return min(self.rank * self.size, self.whole)

    @property
    def stop(self) -> int:
        """The one behind its last."""
        return min(self.start + self.size, self.whole)

    @property
    def filled(self) -> int:
        """Tokens that the rank computes and that are not the sequence's."""
        return self.size - (self.stop - self.start)
