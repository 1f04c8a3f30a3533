"""Answers that are kept for a while.

Invariant: what is kept is bounded in bytes and in time; what was kept first goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


class Kept(Generic[Answer]):
    """Answers to requests, by their ids.

    Args:
        seconds, nbytes: bounds of what is kept.
        clock: seconds.
    """

    def __init__(self, seconds: float, nbytes: int, clock: Callable[[], float]) -> None:
        self._seconds = seconds
        self._most = nbytes
        self._clock = clock
        self._answers: OrderedDict[str, tuple[float, bytes, Answer, int]] = OrderedDict()
        self._bytes = 0

    def __contains__(self, request_id: str) -> bool:
        self._forget()
        return request_id in self._answers

    def find(self, request_id: str, digest: bytes) -> Answer | None:
        """The answer to a request of this content."""
        self._forget()
        kept = self._answers.get(request_id)
        return kept[2] if kept is not None and kept[1] == digest else None

    def keep(self, request_id: str, digest: bytes, answer: Answer, size: int) -> None:
        """Keeps an answer of so many bytes, in the place of another one to this request, if there is room for
        it at all."""
        if size > self._most:
            return
        if request_id in self._answers:
            self._bytes -= self._answers.pop(request_id)[3]
        self._answers[request_id] = self._clock() + self._seconds, digest, answer, size
        self._bytes += size
        self._forget()

    def _forget(self) -> None:
        if not self._answers:
            return
        now = self._clock()
        while self._answers:
            until, _, _, size = next(iter(self._answers.values()))
            if until > now and self._bytes <= self._most:
                return
            self._answers.popitem(last=False)
            self._bytes -= size
