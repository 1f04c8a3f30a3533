"""Whether a pass waits a moment for models that are about to ask for one.

Several models that train in small steps, each waiting for its own, otherwise miss each other for ever:
whoever comes first has a pass of its own, the others come meanwhile and have the next one. A small pass takes
hardly less time than one with the work of all of them. So do models of one program that begin at once.

Invariants: a pass waits at most a fraction of what such a pass takes, and only for models that came back as
soon as that after one of their last two steps, or, after a rest, for those of a company that came together
after one of the last ones, as long as some of it come one upon the other; a model that stays away is waited
for once, and with a company a few times. Pure: no clock, no I/O.

The idea is anticipatory scheduling (Iyer and Druschel, SOSP 2001): a disk that stands still for a moment, for
the next request of the process that it has just answered.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from services.trainer.order.scheduler import Limits

_SMALL = 1 / 8
"""Of what a pass has room for: one with less tokens takes about as long with twice as many."""
_PATIENCE = 1 / 2
"""Of the time that a small pass takes, which is about what two save that become one."""
_LATE = 3
"""Who takes so many times as long as it ever did of late is waited for no more. Of several that are answered
at once the last comes back when all before it have been served."""
_QUIET = 1 / 4
"""Of the longest that a pass waits: those who come together after a rest come as soon one after the other."""
_RESTS = 4
"""After which it is remembered who came together."""
_TIMES = 4
"""That are remembered of a model: of several that are answered at once each is the first to come back one
time, and the last another."""
_REMEMBERED = 4
"""Small passes, the shortest of which is what they take: others waited for the device, or warmed it up."""


@dataclass(eq=False)
class Habit:
    """How soon a model asks for its next batch after a step.

    Attributes:
        tokens: of its last batch.
        last_s: seconds it took the last times, the latest of them last.
        stepped_at: when its last step ended, or began, if it has asked for nothing since.
    """

    tokens: int = 0
    last_s: tuple[float, ...] = ()
    stepped_at: float | None = None

    def stepped(self, now: float) -> None:
        """Its step begins or has ended, and it has nothing else to do."""
        self.stepped_at = now

    def asked(self, tokens: int | None, now: float) -> None:
        """It has asked for something; tokens: of a batch to train on, None of anything else."""
        since, self.stepped_at = self.stepped_at, None
        if tokens is None:
            return
        self.tokens = tokens
        if since is not None:
            self.last_s = (*self.last_s, now - since)[-_TIMES:]

    def awaited_until(self, patience: float, end: float) -> float:
        """Until when its next batch is waited for by who waits so many seconds at most, and until `end`;
        minus infinity = it is not, as nothing speaks for its coming by then. One pause is no habit.

        Whatever the end, it is not waited for beyond one moment, so that one who stays away is waited for
        once."""
        if self.stepped_at is None or self.stepped_at + min(self.last_s[-2:], default=math.inf) > end:
            return -math.inf
        soon = [seconds for seconds in self.last_s if seconds <= patience]
        return min(end, self.stepped_at + _LATE * max(soon, default=-math.inf))


class Anticipation:
    """What small passes take, how long the present one has waited, and who comes after a rest."""

    def __init__(self, limits: Limits) -> None:
        self._small = _SMALL * limits.micro_batches * limits.micro_batch_tokens
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._since: float | None = None
        self._rests_since: float | None = -math.inf
        """When the last pass ended; None while one runs."""
        self._first_at = -math.inf
        """When the first came after the last rest."""
        self._companies: deque[set[Habit]] = deque(maxlen=_RESTS)
        """Of the last rests, the first to come and those who came soon after."""
        self._newest = -math.inf

    def came(self, who: Habit, tokens: int, now: float) -> None:
        """A model that could share a pass asks for a batch of so many tokens to train on."""
        if tokens > self._small:
            return
        self._newest = now
        if self._companies and now - self._first_at <= self._most:
            self._companies[-1].add(who)
        elif self._rests_since is not None and now - self._rests_since > self._most:
            self._first_at = now
            self._companies.append({who})

    def patience(self, tokens: int, others: Iterable[Habit], now: float) -> float:
        """Seconds for which a pass of so many tokens waits unless something comes; 0 = it begins now.

        Args:
            others: of the models that could join it.
        """
        if self._since is None:
            self._since = now
        end = self._since + self._most
        joining = (habit for habit in others if tokens + habit.tokens <= self._small)
        awaited = [habit.awaited_until(self._most, end) for habit in joining]
        if self._is_missing(tokens):
            awaited.append(min(end, self._newest + _QUIET * self._most))
        return max(0.0, max(awaited, default=now) - now)

    def ends(self) -> None:
        """No pass waits any more: there is none, or one begins."""
        self._since = None

    def begins(self) -> None:
        """A pass begins."""
        self.ends()
        self._rests_since = None

    def ended(self, now: float) -> None:
        """A pass has ended."""
        self._rests_since = now

    def passed(self, tokens: int, seconds: float) -> None:
        """A pass that models could share, of so many tokens to train on, took this long."""
        if tokens <= self._small:
            self._seconds.append(seconds)

    @property
    def _most(self) -> float:
        """Seconds that a pass waits at most: 0 while it is not known what small ones take."""
        return _PATIENCE * min(self._seconds) if len(self._seconds) == _REMEMBERED else 0.0

    def _is_missing(self, tokens: int) -> bool:
        """Whether a pass of so many tokens is the first after a rest, and of those who came together of late
        with one who has come somebody who fits in has not."""
        if self._rests_since is None or self._first_at <= self._rests_since:
            return False
        come = self._companies[-1]
        known = set[Habit]().union(*(company for company in self._companies if company & come))
        return any(tokens + habit.tokens <= self._small for habit in known - come)
