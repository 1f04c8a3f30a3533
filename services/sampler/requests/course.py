"""Where a running sample is told to go: on with other weights, or to its end.

Invariants: the weights of a sample only move to newer ones of the same model; what it is told reaches it
where it is, waiting for weights or in the engine; what it is told once it is to end changes nothing. However
many newer weights come one after the other, it gets on: it makes a token on all that it enters the engine
with, and gives up waiting for weights, because newer ones have come, once between two of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from services.sampler.engine.snapshot_key import SnapshotKey

T = TypeVar("T")


class Turned(Exception):
    """What was waited for is not wanted any more: the course is another one."""


class Course:
    """The course of one sample.

    Attributes:
        weights: what it is to run on; None = the base model.
        ended: it is to end with what it has come to.

    Args:
        moves: it goes on with newer weights.
        interrupt: has the engine answer with what the sample has come to, if it generates: at once, or after
            a token of each sequence.
    """

    def __init__(self, weights: SnapshotKey | None, moves: bool, interrupt: Callable[[bool], None]) -> None:
        self.weights = weights
        self.ended = False
        self._moves = moves
        self._interrupt = interrupt
        self._waiting: asyncio.Timeout | None = None
        self._passed_over = False

    def move(self, weights: SnapshotKey | None) -> None:
        """Goes on with these weights, if it moves and they are newer."""
        now = self.weights
        if (
            not self._moves
            or self.ended
            or now is None
            or weights is None
            or now.model_id != weights.model_id
        ):
            return
        if weights.version > now.version:
            self.weights = weights
            if self._waiting is None:
                self._interrupt(False)
            elif not self._passed_over:
                self._passed_over = True
                self._stop_waiting(self._waiting)

    def end(self) -> None:
        """Ends with what it has come to."""
        if not self.ended:
            self.ended = True
            if self._waiting is None:
                self._interrupt(True)
            else:
                self._stop_waiting(self._waiting)

    def enter(self, weights: SnapshotKey | None) -> None:
        """The weights are there, and it goes into the engine with them as soon as this returns.

        Raises:
            Turned: it does not; its course turned when the wait was over.
        """
        if self.ended or (weights != self.weights and not self._passed_over):
            self._passed_over = True
            raise Turned
        self._passed_over = False
        if weights != self.weights:
            # They came while it waited: a token on these, and on to those.
            asyncio.get_running_loop().call_soon(self._interrupt, False)

    async def wait(self, awaited: Awaitable[T]) -> T:
        """Waits as long as the course stays what it is.

        Raises:
            Turned: it has changed; what was waited for is cancelled.
        """
        waiting = asyncio.timeout(None)
        try:
            async with waiting:
                self._waiting = waiting
                return await awaited
        except TimeoutError as error:
            if not waiting.expired():
                raise
            raise Turned from error
        finally:
            self._waiting = None

    @staticmethod
    def _stop_waiting(waiting: asyncio.Timeout) -> None:
        # One that has expired tells of this turn, too.
        if not waiting.expired():
            waiting.reschedule(asyncio.get_running_loop().time())
