"""Work of a vLLM worker beside its steps: a thread, who is told that it is done, and what becomes of its
result.

Invariant: a result takes effect once, on the engine's thread, when `finish` is called, or never: what is
forgotten is freed when its work ends. The front end is told of every job once. No torch, no vLLM.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from services.common.contract.errors import Internal, TinsmithError
from services.common.telemetry.repeats import Repeats

log = logging.getLogger(__name__)

_FAILED = Repeats(log, "a job of a worker failed")

Outcome = list[Any]
"""["done"], ["ok", bytes] or ["error", code, category, message]; plain, because it crosses processes."""

REPORT_BYTES = 1 << 16
"""A report is shorter."""
_MESSAGE_CHARACTERS = 4096
_SEND_S = 60.0


class Report(msgspec.Struct):
    """A line from a worker to the front end, in JSON: the outcome of a job; of none, that it is there."""

    rank: int
    job: str = ""
    outcome: list[str] = []


class Reporter:
    """The connection of one worker to the front end, which is on the same machine. Thread-safe.

    Args:
        path: of the Unix socket that the front end listens on.
        rank: of the worker in its engine.

    Raises:
        OSError: nobody listens there.
    """

    def __init__(self, path: str, rank: int) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(_SEND_S)
        self._socket.connect(path)
        self._send(Report(rank))

    def tell(self, job: str, outcome: Outcome) -> None:
        """Tells what became of a job. Where the front end does not take it the connection ends."""
        # Of names of files there may be characters that no JSON has.
        told = [str(part)[:_MESSAGE_CHARACTERS].encode(errors="replace").decode() for part in outcome]
        try:
            self._send(Report(self._rank, job, told))
        except OSError as error:
            log.warning("the front end is not told of %s: %s", job, error)
            self._socket.close()

    def _send(self, report: Report) -> None:
        with self._lock:
            self._socket.sendall(msgspec.json.encode(report) + b"\n")


class Job:
    """One piece of work.

    Args:
        name: kind of work, "-", and what it is of.
        work: runs in the thread.
        tell: is told ["done"] or the error when the work has ended, in the thread.
        finish: gives the result its effect; returns bytes.
        discard: does away with the result of a job that was forgotten. Runs in a thread.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], Any],
        tell: Callable[[Outcome], None],
        finish: Callable[[Any], int] = lambda _: 0,
        discard: Callable[[Any], None] | None = None,
    ) -> None:
        self._tell = tell
        self._finish = finish
        self._discard = discard
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            self._result = work()
        except BaseException as error:
            self._error = error
        self._tell(["done"] if self._error is None else self._outcome_of(self._error))

    def finish(self) -> Outcome:
        """Gives the result of work that is done its effect."""
        try:
            return ["ok", self._finish(self._result)]
        except Exception as error:
            return self._outcome_of(error)

    def forget(self) -> None:
        """Nobody waits for the result any more, whether the work is done or not."""
        if self._discard is not None:
            name = f"forget {self._thread.name}"
            threading.Thread(
                target=self._discard_result, args=(self._discard,), name=name, daemon=True
            ).start()

    def _discard_result(self, discard: Callable[[Any], None]) -> None:
        self._thread.join()
        if self._error is None:
            discard(self._result)

    def _outcome_of(self, error: BaseException) -> Outcome:
        if isinstance(error, TinsmithError):
            return ["error", error.code, error.category, error.message]
        why = error if isinstance(error, Exception) else repr(error)
        # Every try has an id of its own; which snapshot it was for the front end says.
        _FAILED.failed(self._thread.name.partition("-")[0], why, foreseen=False)
        return ["error", Internal.default_code, "server", f"{type(error).__name__}: {error}"]
