"""Memory for requests that are being received, parsed, checked and journaled, over both edges of a gateway.

Invariants: what they take at their peak stays within one number of bytes, of which no API key holds more than
is left for others. Small bodies have a room of their own, so a heartbeat never waits for anybody's batches.
"""

from __future__ import annotations

from services.common.contract.errors import LimitReached, TooLarge
from services.gateway.access.limits import MIB, SMALL_BODY_BYTES
from services.gateway.access.memory import RECEIVING_COPIES, Memory
from services.gateway.access.shares import Shares

COPIES = 8
"""Memory that a request takes at its peak, in times of its bytes: as it was received, parsed, as an
operation, serialized for the journal, as a command to Redis, and what the allocator keeps in between.
Measured by the kernel in a gateway of its own (tests/unit/gateway/edge/test_peak_memory.py): 3.5 to 5.7 for
batches of 20 MiB, dense or sparse, compressed or not, over either edge; up to 7.4 on another machine."""

JSON_TIMES = 3
"""What a JSON body counts for, in times of its bytes: numbers of three digits, which are four bytes of it,
become 36 bytes of Python each. Measured there too: 17 times the bytes of a prompt of a million of them."""


class BodyBudget:
    """Bytes of memory for large and for small requests."""

    def __init__(self, memory: Memory) -> None:
        self._receiving = memory.receiving
        self._large = Shares(memory.requests)
        self._small = Shares(memory.small_requests)

    @property
    def used(self) -> int:
        """Bytes that all requests hold at present."""
        return self._large.used + self._small.used

    @property
    def largest(self) -> int:
        """Bytes of the largest request that is ever taken."""
        return self._large.room // 2 // COPIES

    def messages_at_once(self, largest: int) -> int:
        """How many messages of unknown size may be received at once, when one may have so many bytes."""
        return max(1, self._receiving // (RECEIVING_COPIES * largest))

    def account(self, owner: str) -> Account:
        """Counts one request of an owner until the context ends."""
        return Account(owner, self._large, self._small)


class Account:
    """What one request takes at present. A context, at whose end it takes nothing."""

    def __init__(self, owner: str, large: Shares, small: Shares) -> None:
        self._owner = owner
        self._large = large
        self._small = small
        self._in_large = 0
        self._in_small = 0

    def __enter__(self) -> Account:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def hold(self, nbytes: int) -> None:
        """The request has so many bytes, all forms that it has at once taken together.

        Raises:
            LimitReached: they are more than this key's share now.
            TooLarge: they are more than any key's share ever.
        """
        self._set(*_needs(nbytes))

    def check(self, nbytes: int) -> None:
        """Refuses early what `hold` would refuse now. Raises as `hold`."""
        held = self._in_large, self._in_small
        self.hold(nbytes)
        self._set(*held)

    def expect(self, nbytes: int) -> None:
        """So many bytes are to be received at most, of a message that tells its size only at its end. Raises
        as `hold`."""
        self._set(RECEIVING_COPIES * nbytes, 0)

    def close(self) -> None:
        """Everything is given back."""
        self._set(0, 0)

    def _set(self, in_large: int, in_small: int) -> None:
        if in_large != self._in_large:
            _change(self._large, self._owner, self._in_large, in_large)
            self._in_large = in_large
        if in_small != self._in_small:
            _change(self._small, self._owner, self._in_small, in_small)
            self._in_small = in_small


def _needs(nbytes: int) -> tuple[int, int]:
    """What a request of this size takes of the room for large ones, and of that for small ones."""
    taken = COPIES * nbytes
    return (0, taken) if nbytes <= SMALL_BODY_BYTES else (taken, 0)


def _change(room: Shares, owner: str, before: int, after: int) -> None:
    more = after - before
    if more <= 0:
        room.add(owner, more)
    elif not room.ever_fits(after):
        raise TooLarge(
            f"a request that takes {after // MIB} MiB of memory is too large for this gateway; send a "
            "smaller one, or start the gateway with a larger --memory-mib"
        )
    elif not room.take(owner, more):
        raise LimitReached(
            f"requests of this API key take {room.held_by(owner) // MIB} MiB of this gateway, which has "
            f"{max(room.free, 0) // MIB} MiB left for all keys (--memory-mib); try again in a second",
            about={"limit": "--memory-mib"},
        )
