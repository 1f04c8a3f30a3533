"""What is free on a volume, for who asks often, and while the volume does not answer.

Invariant: one thread at most asks the volume, and nobody waits for it longer than `_PATIENCE_S`.
"""

from __future__ import annotations

import math
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

_PATIENCE_S = 1.0


def _free_bytes(directory: Path) -> int:
    return shutil.disk_usage(directory).free


class FreeBytes:
    """Thread-safe.

    Args:
        directory: on the volume.
        ask: the volume itself, which may hang.
    """

    def __init__(self, directory: Path, ask: Callable[[Path], int] = _free_bytes) -> None:
        self._directory = directory
        self._ask = ask
        self._lock = threading.Lock()
        self._answer: Future[int] | None = None

    def read(self) -> float:
        """Free bytes; NaN where the volume is not there, or does not answer at once."""
        with self._lock:
            if self._answer is None or self._answer.done():
                self._answer = Future()
                asking = threading.Thread(target=self._answer_with, args=(self._answer,), daemon=True)
                asking.start()
            answer = self._answer
        try:
            return answer.result(_PATIENCE_S)
        except OSError:
            # A wait that took too long is one, too.
            return math.nan

    def _answer_with(self, answer: Future[int]) -> None:
        try:
            answer.set_result(self._ask(self._directory))
        except OSError as error:
            answer.set_exception(error)
