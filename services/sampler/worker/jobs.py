"""Work of a vLLM worker beside its steps: a thread, and what becomes of its result.

Invariant: a result takes effect once, on the engine's thread, when `finish` is called, or never: what is
forgotten is freed when its work ends. No torch, no vLLM.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from services.common.contract.errors import Internal, TinsmithError

log = logging.getLogger(__name__)

Outcome = list[Any]
"""["done"], ["ok", bytes] or ["error", code, category, message]; plain, because it crosses processes."""


class Job:
    """One piece of work.

    Args:
        work: runs in the thread.
        finish: gives the result its effect; returns bytes.
        discard: does away with the result of a job that was forgotten. Runs in a thread.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], Any],
        finish: Callable[[Any], int] = lambda _: 0,
        discard: Callable[[Any], None] | None = None,
    ) -> None:
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

    def poll(self) -> Outcome | None:
        """Whether the work is done; None while it is not. Nothing changes by it."""
        if self._thread.is_alive():
            return None
        return ["done"] if self._error is None else self._outcome_of(self._error)

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
        log.warning("%s failed", self._thread.name, exc_info=error)
        return ["error", Internal.default_code, "server", f"{type(error).__name__}: {error}"]
