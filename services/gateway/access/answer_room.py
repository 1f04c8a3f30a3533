"""Memory for answers in text, from when a sampler has told them until they are made into bytes for a client.

Invariants: what they take stays within one number of bytes, of which no API key holds more than is left for
others; so one whose clients read slowly, or ask for much at once, waits for room that is its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from services.common.contract.errors import LimitReached, TooLarge
from services.gateway.access.limits import MIB
from services.gateway.access.shares import Shares

TEXT_TIMES = 8
"""Memory that an answer of text takes at its peak, in times of what a sampler told: 8 bytes for each token.
Measured in tests/unit/gateway/edge/openai/test_answer_memory.py."""

SCORED_TIMES = 64
"""The same of one with log-probabilities, of which a sampler told 8 bytes for each likely token too."""

PART_BYTES = 2048
"""What a part of a stream takes besides."""

_WAIT_S = 60.0


class AnswerRoom:
    """Bytes of memory for answers.

    Args:
        room: how many there are.
    """

    def __init__(self, room: int) -> None:
        self._shares = Shares(room)
        self._freed = asyncio.Event()

    @property
    def largest(self) -> int:
        """Bytes of the largest answer that is ever taken."""
        return self._shares.room // 2

    @property
    def held(self) -> int:
        """Bytes that answers take at present."""
        return self._shares.room - self._shares.free

    @contextmanager
    def account(self, owner: str) -> Iterator[AnswerAccount]:
        """Counts one answer of an owner until the context ends."""
        account = AnswerAccount(self, owner)
        try:
            yield account
        finally:
            account.give(account.held)

    async def take(self, owner: str, nbytes: int) -> None:
        """Waits until so much is free for the owner.

        Raises:
            TooLarge: that is never so.
            LimitReached: it was not for long.
        """
        if not self._shares.ever_fits(nbytes):
            raise TooLarge(
                f"the answer takes {nbytes // MIB} MiB of memory, which this gateway never has for one "
                "(--memory-mib); ask for fewer tokens, samples or log-probabilities at once"
            )
        try:
            async with asyncio.timeout(_WAIT_S):
                while not self.take_now(owner, nbytes):
                    await self._freed.wait()
        except TimeoutError as error:
            raise LimitReached(
                f"answers of this API key take {self._shares.held_by(owner) // MIB} MiB of this gateway, "
                f"which has {max(self._shares.free, 0) // MIB} MiB left for all (--memory-mib); read them "
                "faster, or send fewer requests at once"
            ) from error

    def take_now(self, owner: str, nbytes: int) -> bool:
        """Takes so much if it is free for the owner; whether it did."""
        return self._shares.take(owner, nbytes)

    def give(self, owner: str, nbytes: int) -> None:
        """So much is free again."""
        self._shares.add(owner, -nbytes)
        self._freed.set()
        self._freed = asyncio.Event()


class AnswerAccount:
    """What one answer takes at present, in bytes."""

    def __init__(self, room: AnswerRoom, owner: str) -> None:
        self._room = room
        self._owner = owner
        self.held = 0

    async def take(self, nbytes: int) -> None:
        """Waits for so much. Raises as `AnswerRoom.take`."""
        await self._room.take(self._owner, nbytes)
        self.held += nbytes

    def take_now(self, nbytes: int) -> bool:
        """Takes so much if it is there; whether it did."""
        taken = self._room.take_now(self._owner, nbytes)
        self.held += nbytes * taken
        return taken

    def give(self, nbytes: int) -> None:
        """Gives so much back."""
        self.held -= nbytes
        self._room.give(self._owner, nbytes)
