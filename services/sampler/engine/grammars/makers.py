"""Threads that make grammars, in the place of vLLM's executor of the engine's core.

vLLM has half as many as the machine has cores, and a grammar that takes long keeps its thread until XGrammar
ends, so that a few would keep everybody's waiting. Here what takes long keeps no place: others are begun
beside it, up to a bound.

Invariant: no more than `at_once` and MOST_LONG are at work, and of one constraint one.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

LONG_S = 1.0
"""What takes longer keeps no place. Most take milliseconds."""

MOST_LONG = 8
"""Of these. More keep their places."""


class _Making:
    def __init__(self, make: Callable[[Any], Any], request: Any) -> None:
        self.constraint = request.structured_output_request.structured_output_key
        self.future: Future[Any] = Future()
        self.since = 0.0
        self._make, self._request = make, request

    def run(self) -> None:
        try:
            self.future.set_result(self._make(self._request))
        except BaseException as error:
            self.future.set_exception(error)


class Makers:
    """Makes the grammars of one engine.

    Args:
        at_once: how many, of those that do not take long.
    """

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._lock = threading.Lock()
        self._waiting: dict[Any, deque[_Making]] = {}
        self._at_work: dict[Any, _Making] = {}

    def submit(self, make: Callable[[Any], Any], request: Any) -> Future[Any]:
        """Has the grammar of a request made in its turn. A future that is cancelled before is passed over."""
        making = _Making(make, request)
        with self._lock:
            self._waiting.setdefault(making.constraint, deque()).append(making)
        self.look()
        return making.future

    def look(self) -> None:
        """Begins what there is a place for by now."""
        while (making := self._next()) is not None:
            threading.Thread(target=self._work, args=(making,), name="grammars", daemon=True).start()

    def since(self, constraint: Any) -> float | None:
        """When a grammar of a constraint was begun that is being made, by the monotonic clock; None: none."""
        making = self._at_work.get(constraint)
        return None if making is None else making.since

    def shutdown(self, wait: bool, cancel_futures: bool) -> None:
        """Begins nothing more. What is at work nothing ends but XGrammar, so there is no waiting for it."""
        with self._lock:
            self._waiting.clear()

    def _work(self, making: _Making | None) -> None:
        while making is not None:
            making.run()
            with self._lock:
                del self._at_work[making.constraint]
            making = self._next()

    def _next(self) -> _Making | None:
        with self._lock:
            now = time.monotonic()
            long = sum(now - making.since >= LONG_S for making in self._at_work.values())
            if len(self._at_work) >= self._at_once + min(long, MOST_LONG):
                return None
            for constraint in [each for each in self._waiting if each not in self._at_work]:
                # It stands behind the others if it has more.
                several = self._waiting.pop(constraint)
                while several:
                    making = several.popleft()
                    if making.future.set_running_or_notify_cancel():
                        making.since = now
                        self._at_work[constraint] = making
                        if several:
                            self._waiting[constraint] = several
                        return making
            return None
