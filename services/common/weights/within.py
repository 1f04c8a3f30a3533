"""A deadline for what a library waits for without one, and cannot be told to leave.

Invariant: whoever asks goes on at the deadline. What does not come back stays behind in a thread of its own,
which ends with the process; of these there are only so many, since nothing more is begun beside them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

MOST_LEFT_BEHIND = 16

_lock = threading.Lock()
_left_behind: set[Future[Any]] = set()


def within(seconds: float, what: str, work: Callable[[], T]) -> T:
    """What the work comes to. Blocking.

    Args:
        what: is done, for the error and the thread's name.

    Raises:
        TimeoutError: it did not within so many seconds, or too much has not come back already. What it comes
            to later nobody hears.
    """
    with _lock:
        _left_behind.difference_update([one for one in _left_behind if one.done()])
        if len(_left_behind) >= MOST_LEFT_BEHIND:
            raise TimeoutError(f"no {what}: {MOST_LEFT_BEHIND} others never came back")
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name=what, daemon=True).start()
    try:
        return done.result(seconds)
    except TimeoutError as error:
        if done.done():
            # Its own.
            raise
        with _lock:
            _left_behind.add(done)
        raise TimeoutError(f"no {what} within {seconds:.1f} s") from error
