"""What the log says of failures that come again and again, for as long as something is away.

Invariants: of a streak of one name's failures the log has the first of each kind, and the end where that is
told. All that come between, of all names, are one line in SAY_AGAIN_S, with their number: an outage fills no
disk, however many things are tried in it how often. What is kept is bounded: of names beyond it there is only
that line.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

SAY_AGAIN_S = 600.0
"""A name that has not failed for so long begins another streak."""
_MOST_NAMES = 4096
_MOST_KINDS = 8
_COMPARED = 300
"""Characters of what is said: an error may quote what a client sent."""
_NUMBERED = re.compile(r"\S*\d\S*")


@dataclass
class _Streak:
    last: float
    failures: int = 0
    kinds: set[int] = field(default_factory=set)


class Repeats:
    """The failures of one kind of work.

    Args:
        log: of the module whose work it is.
        what: failed, in words that begin every line.
        clock: seconds.
    """

    def __init__(self, log: logging.Logger, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._what = what
        self._clock = clock
        self._streaks: dict[str, _Streak] = {}
        self._unsaid = 0
        self._unsaid_since = 0.0

    def failed(self, name: str, why: Exception | str, foreseen: bool = True) -> None:
        """Something failed.

        Args:
            name: of what it was done for.
            why: an error, or words.
            foreseen: else it is an error of the program, and where it failed is said, too.
        """
        now = self._clock()
        streak, words = self._known(name, now), str(why) or repr(why)
        if streak is None:
            self._count(name, words, now)
            return
        streak.failures += 1
        streak.last = now
        kind = _kind(why, words)
        if kind in streak.kinds or len(streak.kinds) >= _MOST_KINDS:
            self._count(name, words, now)
            return
        streak.kinds.add(kind)
        level = logging.WARNING if foreseen else logging.ERROR
        place = why if isinstance(why, Exception) and not foreseen else None
        self._log.log(level, "%s: %s: %s", self._what, name, words, exc_info=place)

    def over(self, name: str) -> None:
        """It did not fail this time."""
        streak = self._streaks.pop(name, None)
        if streak is not None:
            self._log.info("%s: no more of %s, after %d failures", self._what, name, streak.failures)

    def _known(self, name: str, now: float) -> _Streak | None:
        """The streak of a name, perhaps a new one; None where there are too many."""
        streak = self._streaks.get(name)
        if streak is not None and now - streak.last < SAY_AGAIN_S:
            return streak
        if streak is None and len(self._streaks) >= _MOST_NAMES:
            kept = {known: one for known, one in self._streaks.items() if now - one.last < SAY_AGAIN_S}
            self._streaks = kept
            if len(kept) >= _MOST_NAMES:
                return None
        self._streaks[name] = _Streak(now)
        return self._streaks[name]

    def _count(self, name: str, why: str, now: float) -> None:
        if not self._unsaid:
            self._unsaid_since = now
        self._unsaid += 1
        seconds = now - self._unsaid_since
        if seconds >= SAY_AGAIN_S:
            self._log.warning(
                "%s: %d more times in %.0f s, the last %s: %s", self._what, self._unsaid, seconds, name, why
            )
            self._unsaid = 0


def _kind(why: Exception | str, words: str) -> int:
    """By what failures are told apart: all but the words that have numbers, as of bytes, ids and tries."""
    told = (type(why).__name__, getattr(why, "code", ""), getattr(why, "errno", ""))
    return hash((told, _NUMBERED.sub("", words[:_COMPARED])))
