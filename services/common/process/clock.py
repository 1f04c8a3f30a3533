"""What time it is for what is kept and for what goes: by two clocks, this machine's and Redis'.

Either may be wrong, by days: that of a machine that was asleep, or whose time nobody sets. Invariant: what
is noted is noted by the later of the two, and what may go is judged by the earlier. So nothing goes early for
one clock that is wrong, this process's, another's or Redis'; it goes late.

A process that has not heard of Redis' clock has its own alone. Not for what others outside read, as until
when a token lasts, nor for how long something takes.
"""

from __future__ import annotations

import logging
import time

log = logging.getLogger(__name__)

_ALIKE_S = 60.0
_ahead: float | None = None
"""Redis' clock less this machine's monotonic one, which nobody sets."""
_apart = False


def hear(redis_time: float) -> None:
    """Takes note of what Redis' clock says now, in seconds since 1970."""
    global _ahead, _apart
    _ahead = redis_time - time.monotonic()
    off = time.time() - redis_time
    if abs(off) > _ALIKE_S and not _apart:
        log.warning(
            "this machine's clock is %.0f s %s that of Redis: set both by NTP. Until then what is to go by "
            "time goes late, and tokens and URLs that other gateways signed may count as over",
            abs(off),
            "ahead of" if off > 0 else "behind",
        )
    _apart = abs(off) > _ALIKE_S


def to_note() -> float:
    """The time to write down of what happens now, in seconds since 1970."""
    return max(_clocks())


def to_judge() -> float:
    """The time by which something is over, in seconds since 1970."""
    return min(_clocks())


def _clocks() -> tuple[float, ...]:
    own = time.time()
    return (own,) if _ahead is None else (own, time.monotonic() + _ahead)
