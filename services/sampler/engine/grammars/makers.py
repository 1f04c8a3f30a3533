"""Threads that make grammars, in the place of vLLM's executor of the engine's core.

vLLM has half as many as the machine has cores, and a grammar that takes long keeps its thread until XGrammar
ends, so that a few would keep everybody's waiting. Here what takes long keeps no place: others are begun
beside it, up to a bound. XGrammar makes each with several threads, which give way to others then, and run
only where those leave them a core once nobody waits for the grammar any more.

Invariant: no more than `at_once` and MOST_LONG are at work, and of one constraint one.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from services.sampler.engine.grammars.steps import LAST, Busy

LONG_S = 1.0
"""What takes longer keeps no place. Most take milliseconds."""

MOST_LONG = 8
"""Of these. More keep their places."""

_LATER = 10
"""The niceness of these: on a busy machine they are made yet, in their time."""

_NAMES, _THREADS = Path("/proc/thread-self/comm"), Path("/proc/self/task")
_NUMBERS = itertools.count()


class _Making:
    def __init__(self, make: Any, request: Any) -> None:
        self.constraint = request.structured_output_request.structured_output_key
        self.future: Future[Any] = Future()
        self.since, self.long = 0.0, False
        self._make, self._request = make, request
        self._name = f"grammar {next(_NUMBERS) % 10**6}"
        self.future.add_done_callback(self._forget)

    def _forget(self, _: Future[Any]) -> None:
        """One that was given up before its turn stays among those that wait: what it was to read does not."""
        self._make = self._request = None

    def run(self) -> None:
        # What it begins bears its name. Without one it is not found.
        with suppress(OSError):
            _NAMES.write_text(self._name)
        try:
            self.future.set_result(self._make(self._request))
        except BaseException as error:
            self.future.set_exception(error)

    def defer(self, niceness: int) -> None:
        """Has its threads give way to others."""
        for thread in _THREADS.iterdir():
            # It may have ended by now.
            with suppress(OSError):
                if (thread / "comm").read_text().strip() == self._name:
                    os.setpriority(os.PRIO_PROCESS, int(thread.name), niceness)


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
        """Begins what there is a place for by now. To be called again and again while anything waits."""
        with self._lock:
            since = time.monotonic() - LONG_S
            new = [each for each in self._at_work.values() if each.since <= since and not each.long]
            for each in new:
                each.long = True
        for each in new:
            each.defer(_LATER)
        while (making := self._next()) is not None:
            try:
                threading.Thread(target=self._work, args=(making,), name="grammars", daemon=True).start()
            except RuntimeError as error:
                with self._lock:
                    del self._at_work[making.constraint]
                making.future.set_exception(Busy(str(error)))

    def give_up(self, constraint: Any) -> None:
        """Nobody waits any more for what is being made of a constraint."""
        making = self._at_work.get(constraint)
        if making is not None:
            making.defer(LAST)

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
            # What a thread begins that runs after all others would, too: the next `look` goes on.
            making = None if making.long else self._next()

    def _next(self) -> _Making | None:
        with self._lock:
            long = sum(making.long for making in self._at_work.values())
            if len(self._at_work) >= self._at_once + min(long, MOST_LONG):
                return None
            for constraint in [each for each in self._waiting if each not in self._at_work]:
                # It stands behind the others if it has more.
                several = self._waiting.pop(constraint)
                while several:
                    first = several.popleft()
                    if first.future.set_running_or_notify_cancel():
                        first.since = time.monotonic()
                        self._at_work[constraint] = first
                        if several:
                            self._waiting[constraint] = several
                        return first
            return None
