"""One Redis pub/sub subscription of a process.

Invariant: whoever listens is told of every (re-)subscription, because messages sent before it were
not delivered; after that call everything sent is delivered or the next re-subscription follows.
A message that cannot be read is passed over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import redis.asyncio
from redis.exceptions import RedisError

from services.common.contract.errors import TinsmithError
from services.common.process.tasks import cancel_all, keep_running
from services.common.state import redis_client
from services.common.telemetry.repeats import Repeats

log = logging.getLogger(__name__)

_POLL_S = 5.0
_SILENT_S = 15.0
_BACKOFF_S = 0.2


class Subscription:
    """Listens on one channel until stopped.

    Args:
        on_message: called with each message's text.
        on_subscribed: called after every (re-)subscription.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        channel: str,
        on_message: Callable[[str], None],
        on_subscribed: Callable[[], None],
    ) -> None:
        self._redis = client
        self._channel = channel
        self._on_message = on_message
        self._on_subscribed = on_subscribed
        self._unreadable = 0
        self._breaks = Repeats(log, "a subscription broke, subscribing again")
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = keep_running(self._run(), name=f"subscription {self._channel}")

    async def stop(self) -> None:
        await cancel_all([self._task])

    async def _run(self) -> None:
        while True:
            try:
                await self._listen()
            except (RedisError, OSError) as error:
                self._breaks.failed(self._channel, error)
            await asyncio.sleep(_BACKOFF_S)

    def _handle(self, data: bytes) -> None:
        try:
            self._on_message(data.decode())
        except (ValueError, TinsmithError) as error:
            # Somebody else's, or of another version: the messages after it count all the same.
            if not self._unreadable:
                log.error("a message on %s cannot be read, nor may later ones: %s", self._channel, error)
            self._unreadable += 1

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        pubsub = self._redis.pubsub()
        try:
            await pubsub.subscribe(self._channel)
            heard, asked = loop.time(), False
            # Whoever marks the connection knows of another Redis than it leads to.
            while pubsub.connection is None or not pubsub.connection.should_reconnect():
                message = await redis_client.next_message(pubsub, _POLL_S)
                if message is None:
                    # A connection that silently died delivers nothing: ask for a sign of life.
                    if loop.time() - heard > 2 * _SILENT_S:
                        return
                    if loop.time() - heard > _SILENT_S and not asked:
                        await pubsub.ping()
                        asked = True
                    continue
                heard, asked = loop.time(), False
                if message["type"] == "subscribe":
                    self._breaks.over(self._channel)
                    self._on_subscribed()
                elif message["type"] == "message":
                    self._handle(message["data"])
        finally:
            with contextlib.suppress(RedisError, OSError):
                await pubsub.aclose()
