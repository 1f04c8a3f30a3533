"""Whether a request is taken on now: a pure account of what runs and waits here.

Who waits inside the engine waits in the order of arrival, whoever it is. So no more is taken on than the
engine generates at once, and a little beside it, so that it never runs dry while gateways send the next ones.
The others wait in the gateways, where API keys take turns.

Invariants: what is taken on and has not ended never exceeds `sequences + queued`, but for one request that
came while the engine was not full: a group of many samples would never find so many places at once beside
single ones, which take each that falls free. Nor would several gateways between them ever leave the engine
less than full: once a group was turned away, it is not filled up for some seconds, and groups and small ones
have turns at that. For the same reason what is taken on to wait for its weights exceeds `queued` by one
request at most, so requests that need not wait find room beside those that do. What goes on with other
weights, when its own have moved, waits for them whatever waits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from services.common.contract.errors import Overloaded

LATE_S = 5.0
"""A sequence that the engine has had for this long without a first token waits there: its keys and values do
not fit beside those of the others, or too many prompts are before it."""

GROUP_S = 2.0
"""For so long after a group was turned away, small requests leave it the last place of the engine. Gateways
ask again sooner."""

_QUEUED_SHARE = 4
_LEAST_QUEUED = 16


@dataclass(frozen=True)
class Capacity:
    """How much a sampler takes on.

    Attributes:
        sequences: that its engine generates at once.
        queued: that it takes on beside them.
    """

    sequences: int
    queued: int

    @staticmethod
    def of(sequences: int) -> Capacity:
        """That of an engine which generates so many sequences at once."""
        return Capacity(sequences, max(_LEAST_QUEUED, sequences // _QUEUED_SHARE))


class Place:
    """What one request holds."""

    def __init__(self, admission: Admission, sequences: int) -> None:
        self._admission = admission
        self._sequences = sequences
        self._waits = True

    def enter(self) -> None:
        """Its weights are in the engine now, and it goes there."""
        self._waits = False
        self._admission.waiting -= self._sequences

    def leave(self) -> None:
        """It has left the engine, and goes on with other weights."""
        self._waits = True
        self._admission.waiting += self._sequences

    def give_up(self) -> None:
        """It has ended."""
        if self._waits:
            self.enter()
        self._admission.taken -= self._sequences


class Admission:
    """What one sampler has taken on.

    Args:
        clock: seconds.

    Attributes:
        taken: sequences of requests that have not ended.
        waiting: of these, what waits for its weights and is not in the engine.
    """

    def __init__(self, capacity: Capacity, clock: Callable[[], float] = time.monotonic) -> None:
        self._capacity = capacity
        self._clock = clock
        self._group_until = -math.inf
        """So long a group that was turned away may come again."""
        self._groups_turn = True
        """Whether a place is kept for a group: not before a small request was taken on after the last one."""
        self.taken = 0
        self.waiting = 0

    @contextmanager
    def place(self, sequences: int, ready: bool, late: int) -> Iterator[Place]:
        """Takes a request on until the context ends.

        Args:
            ready: its weights are in the engine, and it may use them.
            late: sequences that have been in the engine for LATE_S without a first token.

        Raises:
            Overloaded: not now.
        """
        self._check(sequences, ready, late)
        self._groups_turn = not self._is_group(sequences)
        if not self._groups_turn:
            self._group_until = -math.inf
        self.taken += sequences
        self.waiting += sequences
        place = Place(self, sequences)
        try:
            yield place
        finally:
            place.give_up()

    def _check(self, sequences: int, ready: bool, late: int) -> None:
        if self._is_full_for(sequences):
            if self._is_group(sequences) and self._groups_turn:
                self._group_until = self._clock() + GROUP_S
            raise Overloaded(
                f"this sampler has {self.taken} sequences, of at most {self._most}, and no room for "
                f"{sequences} more now; send the request again, or to another one"
            )
        if late > self._capacity.queued:
            raise Overloaded(
                f"the engine has not begun with {late} of its sequences, for want of memory or time; send "
                "the request again, or to another one"
            )
        if not ready and self.waiting >= self._capacity.queued:
            raise Overloaded(
                f"{self.waiting} sequences wait for other weights than those in the engine, and while "
                f"{self._capacity.queued} do no more may; send the request again, or to another one"
            )

    @property
    def _most(self) -> int:
        return self._capacity.sequences + self._capacity.queued

    def _is_group(self, sequences: int) -> bool:
        return sequences > self._capacity.queued

    def _is_full_for(self, sequences: int) -> bool:
        if not self._is_group(sequences) and self._clock() < self._group_until:
            return self.taken + sequences >= self._capacity.sequences
        return self.taken >= self._capacity.sequences and self.taken + sequences > self._most
