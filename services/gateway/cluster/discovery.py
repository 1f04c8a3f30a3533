"""The live trainers or samplers as a gateway sees them.

Invariant: records are at most about a second old, and a channel is never used for another
incarnation than the one it was opened for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import grpc
import grpc.aio
import redis.asyncio
from redis.exceptions import RedisError

from services.common.contract.errors import TinsmithError, TooLarge, Unavailable
from services.common.process import rpc
from services.common.process.tasks import cancel_all, keep_running
from services.common.state import registry
from services.common.state.registry import ServiceRecord

log = logging.getLogger(__name__)

_REFRESH_S = 1.0
_CLOSING_S = 60.0


def call_error(error: grpc.aio.AioRpcError) -> TinsmithError:
    """The typed error of a failed call to a trainer or sampler.

    Services name the code of every error of theirs. What comes without one is the transport's: the
    service went away, or the message is larger than the transport takes.
    """
    metadata = dict(error.trailing_metadata() or ())
    if rpc.CODE_METADATA not in metadata:
        if error.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):
            return Unavailable(error.details() or error.code().name)
        if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return TooLarge(f"the request is too large to be passed on: {error.details()}")
    return rpc.from_rpc_error(error)


class Discovery:
    """Services of one kind, refreshed in the background."""

    def __init__(self, client: redis.asyncio.Redis, kind: str, refresh: float = _REFRESH_S) -> None:
        self._redis = client
        self._kind = kind
        self._refresh = refresh
        self._records: Sequence[ServiceRecord] = ()
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._listeners: list[Callable[[], None]] = []
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Reads the records once and keeps reading them."""
        await self.refresh()
        self._task = keep_running(self._keep_refreshing(), name=f"discovery of {self._kind}s")

    async def stop(self) -> None:
        await cancel_all([self._task])
        channels, self._channels = self._channels, {}
        await cancel_all(self._closing)
        await asyncio.gather(*(channel.close() for channel in channels.values()))

    def listen(self, on_change: Callable[[], None]) -> None:
        """Has a function called whenever a record came, went or changed."""
        self._listeners.append(on_change)

    def all(self) -> Sequence[ServiceRecord]:
        """Every live service."""
        return self._records

    def serving(self, base_model: str) -> list[ServiceRecord]:
        """Live services of a base model, ready or not, by id."""
        return [record for record in self._records if record.base_model == base_model]

    def channel(self, record: ServiceRecord) -> grpc.aio.Channel:
        """The channel to one incarnation of a service."""
        found = self._channels.get(record.incarnation)
        if found is None:
            found = self._channels[record.incarnation] = rpc.channel(record.address)
        return found

    async def refresh(self) -> None:
        """Reads the records now."""
        records = await registry.live(self._redis, self._kind)
        if records == self._records:
            return
        self._records = records
        live = {record.incarnation for record in records}
        gone = [name for name in self._channels if name not in live]
        for listener in self._listeners:
            listener()
        for name in gone:
            # A call under way on it ends by itself; closing at once would look like a cancelled task.
            closing = asyncio.create_task(self._channels.pop(name).close(grace=_CLOSING_S))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _keep_refreshing(self) -> None:
        while True:
            await asyncio.sleep(self._refresh)
            try:
                await self.refresh()
            except (RedisError, OSError) as error:
                log.warning("could not read the live %ss, using the last known: %s", self._kind, error)
