"""How much of Redis the requests, the results and the records of API keys may take.

The scripts that write, shorten or delete one of them count its bytes in the same step
(`lua/held.lua`), so the account is what is there, also when Redis comes back without its last second.
Invariants: a result is never refused; a sample is accepted only where its largest result has room, too, and
what a batch comes to is smaller than the batch. An API key never holds more than is left for the others, so
there always is room for one that holds nothing. What makes room, such as a step, gets in a number of times; a
request that fails at once needs room for its failure like any other.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.common.contract.errors import LimitReached, Overloaded, TooLarge
from services.common.state import keys

ACCOUNT = (keys.HELD_BYTES, keys.EXPIRING_BYTES)
"""The last keys of every script that counts."""

_UNBOUNDED_TOTAL = 4 << 30
_SHARE = 0.5
_NEARLY_FULL = 0.9


@dataclass(frozen=True)
class RoomLimits:
    """Bounds of what is kept, and times in seconds.

    Attributes:
        total_bytes: what those of all API keys take; 0 = half of the memory that Redis may use, or 4 GiB
            when it has no bound.
        owner_bytes: of one API key; 0 = what is left for others bounds it.
        owner_operations: that wait to run, of one API key over all its models. The first that a model waits
            for gets in all the same, or those behind it would wait for ever.
        result_life: how long a result stays that nobody fetches.
        fetched_life: how long one stays that was fetched, for an answer that was lost on its way.
    """

    total_bytes: int = 0
    owner_bytes: int = 0
    owner_operations: int = 2**18
    result_life: int = 24 * 3600
    fetched_life: int = 600


class Room:
    """What may still be accepted, as one process knows it."""

    def __init__(self, limits: RoomLimits | None = None) -> None:
        self.limits = limits or RoomLimits()
        self._used = self._most = 0
        self._held = self._results = self._journals = 0

    def note_memory(self, used: int, most: int) -> None:
        """Redis has so many bytes in use, of at most so many (0 = no bound)."""
        self._used, self._most = used, most

    @property
    def memory(self) -> tuple[int, int]:
        """Bytes that Redis has in use, and of how many (0 = no bound), as they were told last."""
        return self._used, self._most

    def note_held(self, nbytes: int, results: int, journals: int) -> None:
        """Requests, results and records of all API keys take so many bytes, and of them results and journals
        so many."""
        self._held, self._results, self._journals = nbytes, results, journals

    @property
    def held(self) -> int:
        """Bytes of all requests, results and records, as they were told last."""
        return self._held

    @property
    def results(self) -> int:
        """Bytes of all results, as they were told last; of `held`."""
        return self._results

    @property
    def journals(self) -> int:
        """Bytes of the operations in all journals, as they were told last; of `held`."""
        return self._journals

    @property
    def total(self) -> int:
        """Bytes of what all API keys together may hold."""
        return self.limits.total_bytes or int(self._most * _SHARE) or _UNBOUNDED_TOTAL

    @property
    def bounds(self) -> tuple[int, int]:
        """What all owners, and what one owner may hold for a request to be accepted."""
        return (0, 0) if self._nearly_full() else (self.total, self.limits.owner_bytes or self.total)

    def check_fits(self, nbytes: int) -> None:
        """
        Raises:
            TooLarge: a request that needs so many bytes is refused however little there is.
        """
        most = min(self.total // 2, self.limits.owner_bytes or self.total)
        if nbytes > most:
            raise TooLarge(
                f"the request and its result may take {nbytes} bytes of the state store; send less at once: "
                f"one API key may hold {most}"
            )

    def check(self) -> None:
        """To be called before a record is made that stays.

        Raises:
            Overloaded: the memory of Redis is nearly used up.
        """
        if self._nearly_full():
            raise self.refusal()

    def check_share(self, mine: int, of_all: int, nbytes: int) -> None:
        """To be called before an owner who holds `mine` of what all hold is given so many bytes more.

        Raises:
            Overloaded: that is more than is left for others.
        """
        most, most_of_one = self.bounds
        if mine + nbytes > min(most_of_one, most - of_all - nbytes):
            raise self.refusal()

    def refusal(self) -> Overloaded:
        """What is answered when there is no room."""
        if self._nearly_full():
            return Overloaded(
                f"the memory of the state store is nearly used up ({self._used} of {self._most} bytes); send "
                "this again later, or have the operator raise maxmemory of Redis"
            )
        return LimitReached(
            "the requests, results and records of this API key would take too much of the "
            f"{self.total} bytes that the state store has for all (--state-bytes): never more than is left "
            "for others"
            + (f", and at most {self.limits.owner_bytes} (--owner-bytes)" if self.limits.owner_bytes else "")
            + f". Results go {self.limits.fetched_life} s after they are fetched, batches with the next "
            "optim_step, records --forget-after their session's end, those of checkpoints with these; send "
            "this again later",
            about={"limit": "--owner-bytes" if self.limits.owner_bytes else "--state-bytes"},
        )

    def _nearly_full(self) -> bool:
        return self._most > 0 and self._used > _NEARLY_FULL * self._most
