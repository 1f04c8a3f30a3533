"""How long the demo still takes, from how long its parts took so far.

The parts' shares of the whole are those of a run on two cores; another machine is faster or slower in all of
them by about the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field

SHARES = {"model": 20.0, "cluster": 60.0, "sft": 100.0, "checkpoint": 20.0, "rl": 150.0}
"""Seconds of each part, in order."""

_PRIOR = 60.0
"""Seconds of work at the expected pace that the estimate begins with."""


@dataclass
class Pace:
    """What was done so far. `took`: seconds of each part that is over."""

    took: dict[str, float] = field(default_factory=dict)

    def finish(self, part: str, seconds: float) -> None:
        """A part is over."""
        self.took[part] = seconds

    def left(self, part: str, done: float = 0.0) -> float:
        """Seconds until the end, when this part is under way and so much of it, 0 to 1, is done.

        What was skipped, or was over at once because an earlier run left it, says nothing about the pace.
        Before much is done it is only half believed: a first start reads everything from disk.
        """
        telling = {name: seconds for name, seconds in self.took.items() if seconds > SHARES[name] / 10}
        expected = sum(SHARES[name] for name in telling)
        factor = (_PRIOR + sum(telling.values())) / (_PRIOR + expected)
        names = list(SHARES)
        later = sum(SHARES[name] for name in names[names.index(part) + 1 :])
        return factor * (SHARES[part] * (1 - done) + later)


def words(seconds: float) -> str:
    """A time to wait, as one says it."""
    if seconds < 50:
        return f"about {max(10, round(seconds / 10) * 10)} s left"
    minutes = round(seconds / 30) / 2 if seconds < 300 else round(seconds / 60)
    return f"about {minutes:g} min left"
