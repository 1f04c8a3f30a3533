"""Waiting for results.

Invariant: a waiter first is listed and then looks, so a result published in between wakes it; when
the subscription was interrupted every waiter looks again. Nothing polls. A result that this process
resolves a future with goes to its waiters here without another look, once it is resolved with that, or to the
first who asks for it after that; one that may be told first (`dispatch/plan.py`) goes to them while it is
written. While this process is about to resolve one, nobody looks; when it no longer is, all who wait do. What
one waiter costs does not depend on how many there are.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import redis.asyncio

from services.common.contract import ids
from services.common.process.tasks import cancel_all, detached, give_way
from services.common.state import keys
from services.common.state.journal_records import Published
from services.gateway.results.recent import RecentResults
from services.gateway.results.subscription import Subscription

_BATCH = 128
_FIELDS = ["state", "result", "reason"]


class FutureView(msgspec.Struct, frozen=True):
    """A future as seen now.

    Attributes:
        state: "unknown" when it does not exist or its result expired.
        result: serialized OperationResult, when done.
        queue_state: "paused_capacity" when nothing can run it at the moment.
        queue_state_reason: a sentence, when paused.
    """

    state: Literal["pending", "done", "unknown"]
    result: bytes | None = None
    queue_state: Literal["active", "paused_capacity"] = "active"
    queue_state_reason: str | None = None


@dataclass(eq=False)
class _Waiter:
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    result: bytes | None = None


class Futures:
    """Lets any number of callers wait for futures over one subscription."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._redis = client
        self._waiters: defaultdict[str, set[_Waiter]] = defaultdict(set)
        self._coming: set[str] = set()
        self._resolving: set[str] = set()
        self._told: dict[str, bytes] = {}
        self._recent = RecentResults()
        self._wanted: dict[str, asyncio.Future[FutureView]] = {}
        self._loads: set[asyncio.Task[None]] = set()
        self._listeners: list[tuple[Callable[[str], None], Callable[[], None]]] = []
        self._draining = False
        self._subscription = Subscription(client, keys.DONE_CHANNEL, self._wake, self._wake_all)

    def listen(self, on_resolved: Callable[[str], None], on_gap: Callable[[], None]) -> None:
        """Has functions called: with each request id that is resolved, and when some may have been missed."""
        self._listeners.append((on_resolved, on_gap))

    @property
    def waited_for(self) -> int:
        """Futures that somebody waits for here."""
        return len(self._waiters)

    async def start(self) -> None:
        self._subscription.start()

    async def stop(self) -> None:
        """Stops listening and ends all waits where they are."""
        await self._subscription.stop()
        self.drain()
        await cancel_all(self._loads)

    @property
    def draining(self) -> bool:
        """Whether waits end at once."""
        return self._draining

    def drain(self) -> None:
        """Ends all waits with what was seen last, and from now on every one after its first look."""
        self._draining = True
        self._wake_all()

    def expect(self, request_id: str) -> None:
        """This process is about to resolve a future, which is pending. Until `expect_no_longer`, who waits
        for it here does not look first."""
        self._coming.add(request_id)

    def expect_no_longer(self, request_id: str) -> None:
        """This process has resolved a future, or will not."""
        self._coming.discard(request_id)
        for waiter in self._waiters.get(request_id, ()):
            waiter.changed.set()

    def expected(self, request_id: str) -> bool:
        """Whether this process is about to resolve a future."""
        return request_id in self._coming

    async def wait(self, request_id: str, timeout: float) -> FutureView:  # noqa: ASYNC109
        """The future when it is resolved, else as it is after `timeout` seconds (0 = now) or at `drain`.

        Raises:
            InvalidRequest: the text is no request id.
        """
        here = self._told.get(request_id) or self._recent.take(request_id)
        if here is not None:
            return FutureView("done", here)
        ids.parse_request_id(request_id)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        waiter = _Waiter()
        self._waiters[request_id].add(waiter)
        looks = timeout <= 0 or self._draining or not self.expected(request_id)
        view = FutureView("pending")
        try:
            while True:
                if looks:
                    waiter.changed.clear()
                    view = await self._look(request_id)
                    if view.state != "pending" or self._draining or deadline <= loop.time():
                        return view
                looks = True
                try:
                    async with asyncio.timeout_at(deadline):
                        await waiter.changed.wait()
                except TimeoutError:
                    return await self._look(request_id)
                if waiter.result is not None:
                    return FutureView("done", waiter.result)
                if self._draining:
                    return view
        finally:
            waiters = self._waiters[request_id]
            waiters.discard(waiter)
            if not waiters:
                del self._waiters[request_id]

    async def resolve(
        self,
        request_id: str,
        result: bytes,
        publish: Callable[[], Awaitable[Published]],
        told_first: bool = False,
    ) -> Published:
        """Calls `publish`, which resolves a future, and hands the result to those who wait for it here; when
        none does, to the first who asks.

        Args:
            result: what `publish` writes: a serialized OperationResult.
            told_first: those who wait for it here, or ask meanwhile, have it before it is written.
        """
        self._resolving.add(request_id)
        outcome, told = None, False
        try:
            if told_first:
                self._told[request_id] = result
                told = self._hand(request_id, result)
                # They have their turn, and their clients are sent it, before the writing takes any time.
                await give_way(2)
            outcome = await publish()
            return outcome
        finally:
            self._resolving.discard(request_id)
            self._told.pop(request_id, None)
            # Whatever else came of it, perhaps it is resolved all the same: they look.
            told |= self._hand(request_id, result if outcome is Published.PUBLISHED else None)
            if not told and outcome is Published.PUBLISHED:
                self._recent.keep(request_id, result)

    def is_resolving(self, request_id: str) -> bool:
        """Whether a result is being written, which those who ask may have already."""
        return request_id in self._resolving

    def _hand(self, request_id: str, result: bytes | None) -> bool:
        """Wakes those who wait for a future, with its result unless they are to look; whether any do."""
        waiters = self._waiters.get(request_id, ())
        for waiter in waiters:
            waiter.result = result
            waiter.changed.set()
        return bool(waiters)

    def _wake(self, request_id: str) -> None:
        if request_id not in self._resolving:
            for waiter in self._waiters.get(request_id, ()):
                waiter.changed.set()
        for on_resolved, _ in self._listeners:
            on_resolved(request_id)

    def _wake_all(self) -> None:
        for _, on_gap in self._listeners:
            on_gap()
        for waiters in self._waiters.values():
            for waiter in waiters:
                waiter.changed.set()

    async def _look(self, request_id: str) -> FutureView:
        """Reads one future; those asked for in the same turn of the loop share a round trip."""
        found = self._wanted.get(request_id)
        if found is None:
            loop = asyncio.get_running_loop()
            if not self._wanted:
                loop.call_soon(self._start_load)
            found = self._wanted[request_id] = loop.create_future()
        # Shielded: others may share it.
        return await asyncio.shield(found)

    def _start_load(self) -> None:
        wanted, self._wanted = self._wanted, {}
        requests = list(wanted.items())
        for start in range(0, len(requests), _BATCH):
            load = detached(self._load(dict(requests[start : start + _BATCH])), "load of futures")
            self._loads.add(load)
            load.add_done_callback(self._loads.discard)

    async def _load(self, wanted: dict[str, asyncio.Future[FutureView]]) -> None:
        try:
            pipeline = self._redis.pipeline(transaction=False)
            for request_id in wanted:
                object_id, seq_id = ids.parse_request_id(request_id)
                pipeline.hmget(keys.future(object_id, seq_id), _FIELDS)
                pipeline.get(keys.queue_state(object_id))
            replies = await pipeline.execute()
        except BaseException as error:
            for future in wanted.values():
                if isinstance(error, asyncio.CancelledError):
                    future.cancel()
                elif not future.done():
                    future.set_exception(error)
                    future.exception()
            if not isinstance(error, Exception):
                raise
            return
        for i, future in enumerate(wanted.values()):
            if not future.done():
                future.set_result(_view(replies[2 * i], replies[2 * i + 1]))


def _view(fields: list[Any], queue_state: bytes | None) -> FutureView:
    state, result, reason = fields
    if state is None:
        return FutureView("unknown")
    if state == b"done":
        return FutureView("done", result)
    why = reason or queue_state
    if why:
        return FutureView("pending", None, "paused_capacity", why.decode())
    return FutureView("pending")
