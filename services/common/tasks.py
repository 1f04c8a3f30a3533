"""Ending background tasks.

Invariant: when `cancel_all` returns, the tasks have ended. One `Task.cancel` is not enough: under Python
3.11 `asyncio.wait_for`, which redis-py calls for every command it sends, loses a cancellation that comes
in the same turn of the loop as its result (python/cpython#86296, fixed in 3.12).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

_AGAIN_S = 0.05


async def cancel_all(tasks: Iterable[asyncio.Task[Any] | None]) -> None:
    """Cancels tasks until they have ended. Their results and errors are not looked at."""
    running = {task for task in tasks if task is not None and not task.done()}
    while running:
        for task in running:
            task.cancel()
        _, running = await asyncio.wait(running, timeout=_AGAIN_S)
