"""One thread that carries out blocking calls in order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class WorkerThread:
    """A daemon: a collective that never returns must not keep the process from exiting."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Queues a call."""
        future: Future[T] = Future()
        self._work.put((function, future))
        return future

    def close(self) -> None:
        """Lets the thread end after the calls it has."""
        self._work.put(None)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            function, future = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
            # The next wait may be long; it must not keep arguments and results alive.
            del item, function, future
