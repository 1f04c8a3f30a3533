"""What replicas are told of the samples that they run.

Invariants: a word is said again until its replica has heard it or it is not wanted any more; of the words of
one kind about one sample only the last is said, and one that is said already is not begun anew; when `stop`
returns none is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import grpc.aio

from services.common.process.tasks import cancel_all
from services.gateway.dispatch.plan import backoff

log = logging.getLogger(__name__)

COMES_S = 5.0
"""How long a sample may be on its way to the replica that is to run it, and does not know it before."""

TELL_S = 10.0
"""How long a replica may take to answer a word."""


class Words:
    """The words of one gateway."""

    def __init__(self) -> None:
        self._said: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def say(
        self, kind: str, request_id: str, word: Callable[[], Awaitable[bool]], wanted: Callable[[], bool]
    ) -> None:
        """Says a word about a sample, in the background.

        Args:
            kind: what about; an earlier word of this kind is not said any more.
            word: says it once; whether it was heard. Raises AioRpcError.
            wanted: whether it is to be said again.
        """
        before = self._said.get((kind, request_id))
        if before is not None:
            before.cancel()
        task = asyncio.create_task(_until_heard(kind, request_id, word, wanted), name=f"{kind} {request_id}")
        self._said[kind, request_id] = task
        self._tasks.add(task)
        task.add_done_callback(lambda _: self._ended(kind, request_id, task))

    def says(self, kind: str, request_id: str) -> bool:
        """Whether a word is being said."""
        return (kind, request_id) in self._said

    async def stop(self) -> None:
        """Gives replicas some time to hear what was said."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=TELL_S)
        await cancel_all(self._tasks)

    def _ended(self, kind: str, request_id: str, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._said.get((kind, request_id)) is task:
            del self._said[kind, request_id]


async def _until_heard(
    kind: str, request_id: str, word: Callable[[], Awaitable[bool]], wanted: Callable[[], bool]
) -> None:
    tries = 0
    while True:
        try:
            if await word():
                return
        except grpc.aio.AioRpcError as error:
            if not tries:
                log.info("could not %s sample %s, trying on: %s", kind, request_id, error.details())
        tries += 1
        await asyncio.sleep(backoff(tries))
        if not wanted():
            return
