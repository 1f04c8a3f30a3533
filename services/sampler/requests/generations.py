"""Runs each request once, however often and by whomever it is asked for.

A gateway that dies, ends or loses Redis leaves its requests to another one or to its next start, which asks
for them again: what runs is joined, and what has just finished is answered as it is.

Invariants: of one request id never more than one generation runs. It ends when it is done, when it is given
up by name, or when nobody has waited for it for a while; one waiter that goes away does not end it. What is
kept of finished ones is bounded in bytes and in time; failures are not kept.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from services.common.contract.errors import Cancelled, Overloaded, TinsmithError
from services.common.process.tasks import cancel_all
from services.common.telemetry.repeats import Repeats
from services.sampler.requests.kept import Kept

log = logging.getLogger(__name__)

GRACE_S = 60.0
"""How long a generation goes on that nobody waits for: a gateway is found dead, and its samples are with
another one, in a fraction of it."""

KEPT_S = 120.0
KEPT_BYTES = 128 << 20

Answer = TypeVar("Answer")
Make = Callable[[], Coroutine[Any, Any, Answer]]


class _Generation(Generic[Answer]):
    """One that runs, and who waits for it."""

    def __init__(self, digest: bytes, task: asyncio.Task[Answer]) -> None:
        self.digest = digest
        self.task = task
        self._waiters: set[asyncio.Future[None]] = set()
        self._end: asyncio.TimerHandle | None = None
        self._reason: TinsmithError | None = None

    def give_up(self, reason: TinsmithError) -> None:
        self._reason = reason
        self.task.cancel()

    async def wait(self, seconds: float | None, grace: float) -> Answer | None:
        if not self.task.done():
            await self._woken(seconds, grace)
        if not self.task.done():
            return None
        if self.task.cancelled():
            raise self._reason or Cancelled("nobody waited for the sample any more")
        return self.task.result()

    async def _woken(self, seconds: float | None, grace: float) -> None:
        # As asyncio.wait of the one task, for less of a core.
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        self._waiters.add(waiter)
        self.stop_timer()
        late = None if seconds is None else loop.call_later(seconds, _wake, waiter)
        try:
            await waiter
        finally:
            if late is not None:
                late.cancel()
            self._waiters.remove(waiter)
            if not self._waiters and not self.task.done():
                self._end = loop.call_later(grace, self.task.cancel)

    def ended(self) -> None:
        """Its task is done."""
        self.stop_timer()
        for waiter in self._waiters:
            _wake(waiter)

    def stop_timer(self) -> None:
        if self._end is not None:
            self._end.cancel()
            self._end = None


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class Generations(Generic[Answer]):
    """The generations of one sampler.

    Args:
        size: bytes of an answer; None = it is not kept.
        grace: seconds that a generation goes on without a waiter.
        kept_seconds, kept_bytes: bounds of what is kept of finished ones.
    """

    def __init__(
        self,
        size: Callable[[Answer], int | None],
        grace: float = GRACE_S,
        kept_seconds: float = KEPT_S,
        kept_bytes: int = KEPT_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._size = size
        self._grace = grace
        self._running: dict[str, _Generation[Answer]] = {}
        self._failed = Repeats(log, "a sample failed")
        self._finished: Kept[Answer] = Kept(kept_seconds, kept_bytes, clock)

    def knows(self, request_id: str) -> bool:
        """Whether a request of this id runs or has just finished."""
        return request_id in self._running or request_id in self._finished

    async def answer(
        self, request_id: str, digest: bytes, make: Make[Answer], seconds: float | None = None
    ) -> Answer | None:
        """The answer to a request: what is kept, or that of the generation that runs, or of a new one.

        Args:
            digest: of the request's content; another content is another request, whatever its id.
            make: generates; it is cancelled when nobody wants the answer any more.
            seconds: waits no longer than this; None = to the end.

        Returns:
            None when the generation still runs. It goes on for whoever asks again.

        Raises:
            Cancelled: it was given up by name.
            TinsmithError: what it failed with.
        """
        if (kept := self._finished.find(request_id, digest)) is not None:
            return kept
        running = self._running.get(request_id)
        if running is not None and running.digest != digest:
            running.give_up(Cancelled("another request with the same id took this one's place"))
        if running is None or running.digest != digest or running.task.cancelling():
            running = self._begin(request_id, digest, make)
        return await running.wait(seconds, self._grace)

    def give_up(self, request_id: str) -> bool:
        """Ends what runs of a request at once, whoever waits for it; whether anything did."""
        running = self._running.get(request_id)
        if running is not None:
            running.give_up(Cancelled("the sample was given up"))
        return running is not None

    async def end(self, seconds: float, reason: TinsmithError) -> None:
        """Waits until all have ended, for at most so long; the others end with `reason`."""
        tasks = [generation.task for generation in self._running.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
        for generation in self._running.values():
            generation.give_up(reason)
        await cancel_all(tasks)

    def _begin(self, request_id: str, digest: bytes, make: Make[Answer]) -> _Generation[Answer]:
        task = asyncio.create_task(make(), name=f"sample {request_id}")
        generation = self._running[request_id] = _Generation(digest, task)
        task.add_done_callback(lambda _: self._ended(request_id, generation))
        return generation

    def _ended(self, request_id: str, generation: _Generation[Answer]) -> None:
        generation.ended()
        if self._running.get(request_id) is generation:
            del self._running[request_id]
        if generation.task.cancelled():
            return
        if (error := generation.task.exception()) is not None:
            if isinstance(error, Overloaded):
                # What a busy sampler says all day: its gateways wait and ask again.
                return
            self._failed.failed(getattr(error, "code", ""), f"{request_id}: {error}")
            return
        answer = generation.task.result()
        size = self._size(answer)
        if size is not None:
            self._finished.keep(request_id, generation.digest, answer, size)
