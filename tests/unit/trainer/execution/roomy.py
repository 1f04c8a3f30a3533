"""What stands for room that adapters have, where a device has memory for all that it is asked for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


class Roomy:
    """Lets whatever needs memory have it."""

    async def with_memory(self, mine: int, attempt: Callable[[], Awaitable[T]], *, patient: bool = True) -> T:
        return await attempt()
