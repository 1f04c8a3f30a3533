"""Sends hostile requests and notes what became of each.

Invariant: every attempt ends as one of: answered, refused, closed by the server, a fault of the server
(5xx, INTERNAL, UNKNOWN), or a hang: no end within its time.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum


class End(StrEnum):
    """How an attempt ended."""

    ANSWERED = "answered"
    REFUSED = "refused"
    CLOSED = "closed"
    FAULT = "5xx"
    HANG = "hang"


@dataclass(frozen=True)
class Outcome:
    """`detail` tells of a fault what the server said."""

    end: End
    detail: str = ""


@dataclass(frozen=True)
class Attempt:
    """One hostile request.

    Attributes:
        kind: what is hostile about it.
        send: sends it and waits for its end.
        seconds: longest time until it has ended.
    """

    kind: str
    send: Callable[[], Awaitable[Outcome]]
    seconds: float = 90.0


@dataclass
class Tally:
    """What became of all attempts."""

    kinds: Counter[str] = field(default_factory=Counter)
    ends: Counter[End] = field(default_factory=Counter)
    trouble: list[str] = field(default_factory=list)

    def add(self, attempt: Attempt, outcome: Outcome) -> None:
        self.kinds[attempt.kind] += 1
        self.ends[outcome.end] += 1
        if outcome.end in (End.FAULT, End.HANG):
            self.trouble.append(f"{attempt.kind}: {outcome.end} {outcome.detail[:300]}")


async def attack(attempts: Iterable[Attempt], at_once: int) -> Tally:
    """Makes all attempts, a number of them at the same time."""
    tally, waiting = Tally(), iter(attempts)

    async def worker() -> None:
        for attempt in waiting:
            tally.add(attempt, await _end_of(attempt))

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(worker())
    return tally


async def _end_of(attempt: Attempt) -> Outcome:
    try:
        async with asyncio.timeout(attempt.seconds):
            return await attempt.send()
    except TimeoutError:
        return Outcome(End.HANG, f"no end within {attempt.seconds:g} s")
    except (ConnectionError, asyncio.IncompleteReadError) as error:
        return Outcome(End.CLOSED, str(error))
