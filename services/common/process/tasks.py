"""Background tasks that run as long as their process, and how they end.

Invariants: a task of `keep_running` that ends by itself takes the process with it, so its failure is seen.
When `cancel_all` returns, the tasks have ended. One `Task.cancel` is not enough: under Python
3.11 `asyncio.wait_for`, which redis-py calls for every command it sends, loses a cancellation that comes
in the same turn of the loop as its result (python/cpython#86296, fixed in 3.12).
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextvars import Context
from typing import Any, TypeVar

log = logging.getLogger(__name__)

_AGAIN_S = 0.05

T = TypeVar("T")
R = TypeVar("R")


def keep_running(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Starts a task that must go on until it is cancelled.

    Should it end by itself, the reason is logged and this process asks itself to stop: it drains like on
    any SIGTERM, and its supervisor starts a whole one.
    """
    task = detached(work, name)
    task.add_done_callback(_stop_unless_cancelled)
    return task


def detached(work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """A task that serves nobody in particular, whoever starts it: what it logs is told of no caller."""
    return asyncio.create_task(work, name=name, context=Context())


def unheard(future: asyncio.Future[T]) -> asyncio.Future[T]:
    """The future, whose error is not worth a line of the log where nobody asks for it."""
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


def _stop_unless_cancelled(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        log.critical("%s ended by itself; stopping", task.get_name(), exc_info=task.exception())
        os.kill(os.getpid(), signal.SIGTERM)


async def give_way(turns: int) -> None:
    """Lets what is ready go first, for so many turns of the loop. What a turn writes is sent at its end."""
    for _ in range(turns):
        await asyncio.sleep(0)


async def a_few_at_once(
    function: Callable[[T], Awaitable[R]], items: Sequence[T], at_once: int = 32
) -> list[R]:
    """What the function gives for every item, in order. However many there are, `at_once` of its calls run at
    a time, so that those of others are not kept from what all of them share, such as connections."""
    found: list[R] = []
    for start in range(0, len(items), at_once):
        found += await asyncio.gather(*map(function, items[start : start + at_once]))
    return found


async def cancel_all(tasks: Iterable[asyncio.Task[Any] | None]) -> None:
    """Cancels tasks until they have ended. Their results and errors are not looked at."""
    running = {task for task in tasks if task is not None and not task.done()}
    while running:
        for task in running:
            task.cancel()
        _, running = await asyncio.wait(running, timeout=_AGAIN_S)
