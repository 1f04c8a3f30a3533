"""Memory for answers, from when they are read or told here until their client has them.

Invariants: what they take stays within one number of bytes, of which no API key holds more than is left for
others; so one whose clients read slowly, or ask for much at once, waits for room that is its own. The answers
of a key get room in the order in which they ask for it, and none holds some while it waits for more.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque

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

PASSED_TIMES = 4
"""The same of a result that is passed on: as it was read, as two messages, and as it is sent."""

_SMALL_SHARE = 1024

WAIT_S = 60.0
"""How long an answer waits for room."""


class AnswerRoom:
    """Bytes of memory for answers.

    Args:
        room: how many there are.
    """

    def __init__(self, room: int) -> None:
        self._shares = Shares(room)
        # Keys in the order in which they were last dealt to.
        self._waiting: OrderedDict[str, deque[tuple[int, asyncio.Future[None]]]] = OrderedDict()
        self._dealing = False

    @property
    def largest(self) -> int:
        """Bytes of the largest answer that is ever taken."""
        return self._shares.room // 2

    def of_result(self, nbytes: int) -> int:
        """What a result of so many bytes counts for. It is there, and must come to its client beside others'
        answers, so it never counts for more than an eighth of the room."""
        return min(PASSED_TIMES * nbytes, self._shares.room // 8)

    @property
    def held(self) -> int:
        """Bytes that answers take at present."""
        return self._shares.room - self._shares.free

    def account(self, owner: str) -> AnswerAccount:
        """Counts one answer of an owner until the context ends."""
        return AnswerAccount(self, owner)

    async def take(self, owner: str, nbytes: int, seconds: float = WAIT_S) -> None:
        """Waits until so much is free for the owner, and what it asked for before was taken.

        Raises:
            TooLarge: that is never so.
            LimitReached: it was not for long.
        """
        if not self._shares.ever_fits(nbytes):
            raise TooLarge(
                f"the answer takes {nbytes // MIB} MiB of memory, which this gateway never has for one "
                "(--memory-mib); ask for fewer tokens, samples or log-probabilities at once"
            )
        if self.take_now(owner, nbytes):
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append((nbytes, granted))
        try:
            async with asyncio.timeout(seconds):
                await granted
        except BaseException as error:
            if granted.done() and not granted.cancelled():
                self._shares.add(owner, -nbytes)
            # Whoever waits behind it may fit.
            self._deal_soon()
            if not isinstance(error, TimeoutError):
                raise
            raise self.refusal(owner) from error

    def refusal(self, owner: str) -> LimitReached:
        """What is said when an owner's answers take too much."""
        return LimitReached(
            f"answers of this API key take {self._shares.held_by(owner) // MIB} MiB of this gateway, "
            f"which has {max(self._shares.free, 0) // MIB} MiB left for all (--memory-mib); read them "
            "faster, or send fewer requests at once",
            about={"limit": "--memory-mib"},
        )

    def take_now(self, owner: str, nbytes: int) -> bool:
        """Takes so much if it is free for the owner and nothing of it waits, which what is very small passes
        by; whether it did."""
        small = nbytes <= self._shares.room // _SMALL_SHARE
        return (small or owner not in self._waiting) and self._shares.take(owner, nbytes)

    def give(self, owner: str, nbytes: int) -> None:
        """So much is free again."""
        self._shares.add(owner, -nbytes)
        self._deal_soon()

    def _deal_soon(self) -> None:
        """Once for all that is given back in this turn of the loop."""
        if self._waiting and not self._dealing:
            self._dealing = True
            asyncio.get_running_loop().call_soon(self._deal)

    def _deal(self) -> None:
        """Gives room to the first of each key that it fits, and so on while it fits any."""
        self._dealing = False
        more = True
        while more:
            more = False
            for owner in list(self._waiting):
                queue = self._waiting[owner]
                while queue and queue[0][1].done():
                    queue.popleft()
                if queue and self._shares.take(owner, queue[0][0]):
                    queue.popleft()[1].set_result(None)
                    self._waiting.move_to_end(owner)
                    more = True
                if not queue:
                    del self._waiting[owner]


class AnswerAccount:
    """What one answer takes at present, in bytes. A context, at whose end it takes nothing."""

    def __init__(self, room: AnswerRoom, owner: str) -> None:
        self._room = room
        self._owner = owner
        self.held = 0

    def __enter__(self) -> AnswerAccount:
        return self

    def __exit__(self, *error: object) -> None:
        self.give(self.held)

    async def take(self, nbytes: int, seconds: float = WAIT_S) -> None:
        """Waits for so much. Raises as `AnswerRoom.take`."""
        await self._room.take(self._owner, nbytes, seconds)
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


class Together:
    """Room for the parts of one answer, which is taken for all of them at once.

    Args:
        parts: how many there are.
    """

    def __init__(self, account: AnswerAccount, parts: int) -> None:
        self._account = account
        self._missing = parts
        self._nbytes = 0
        self._taken = asyncio.Event()

    async def take(self, nbytes: int) -> None:
        """One part takes so much: waits until all have told what they take, and there is room for that. When
        there is none, the last part raises as `AnswerRoom.take`, and the others wait on."""
        self._nbytes += nbytes
        self._missing -= 1
        if self._missing:
            await self._taken.wait()
        else:
            await self._account.take(self._nbytes)
            self._taken.set()
