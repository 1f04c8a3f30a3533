"""Threads for what would hold up the event loop, in pools by what it waits for.

Invariant: work that waits for a disk or an object store never takes a thread from work that computes, nor a
deletion, a cleaning or a copy of many files one from a read. Each pool has few threads; who waits for one
holds a place among the bounded calls of the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from services.common.contract.errors import Unavailable

T = TypeVar("T")


class Pool:
    """Threads for one kind of work.

    Args:
        name: of the threads.
        threads: how many there are at most.
        deadline: seconds that one piece of work may take, its wait for a thread included; None: it only
            computes, and comes to an end by itself, or who waits has a deadline.
    """

    def __init__(self, name: str, threads: int, deadline: float | None) -> None:
        self._name = name
        self._deadline = deadline
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)

    async def run(self, work: Callable[..., T], *args: object) -> T:
        """What the work comes to in a thread.

        Raises:
            Unavailable: it took too long. It may still run.
        """
        running = asyncio.get_running_loop().run_in_executor(self._threads, work, *args)
        try:
            async with asyncio.timeout(self._deadline):
                return await running
        except TimeoutError as error:
            if not running.cancelled():
                raise
            raise Unavailable(f"no {self._name} within {self._deadline:g} s; try again later") from error


COMPUTE_THREADS = 2
COMPUTE = Pool("compute", COMPUTE_THREADS, None)
"""Parsing, checking and encoding of large messages."""

READS = Pool("storage read", 16, 60.0)
"""Reads of files and of the object store."""

COPY_THREADS = 2
COPIES = Pool("copy of a checkpoint", COPY_THREADS, None)
"""Copies of all files of a checkpoint, which may be hundreds of gigabytes and take hours."""

DELETIONS = Pool("deletion", 4, 600.0)
"""What sweeps take away."""

CLEANINGS = Pool("cleaning of a storage", 1, 6 * 3600.0)
"""Looks through whole storages, whose lists may take hours."""

LOOKS = Pool("answer of the checkpoints' storage", 16, 60.0)
"""Whether it answers at all, before much is asked of it."""

TRANSFERS = Pool("transfer of a checkpoint", 16, 6 * 3600.0)
"""Checkpoints of a trainer that are saved and loaded, of which one may be a terabyte."""
