"""Threads for what would hold up the event loop, in pools by what it waits for.

Invariant: work that waits for a disk or an object store never takes a thread from work that computes, nor a
deletion, a cleaning or a copy of many files one from a read. Each pool has few threads; who waits for one
holds a place among the bounded calls of the process.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Generic, TypeVar

from services.common.contract.errors import Unavailable

T = TypeVar("T")

_LOOKS_PER_STANDSTILL = 10


class Pool:
    """Threads for one kind of work.

    Args:
        name: of the threads.
        threads: how many there are at most.
        deadline: seconds that one piece of work may take, its wait for a thread included; None: it only
            computes, and comes to an end by itself, or who waits has a deadline.
        standstill: seconds for which its thread may wait without being woken once; None: any time.
    """

    def __init__(
        self, name: str, threads: int, deadline: float | None, standstill: float | None = None
    ) -> None:
        self._name = name
        self._deadline = deadline
        self._standstill = standstill
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)

    async def run(
        self, work: Callable[..., T], *args: object, late: Callable[[T], object] | None = None
    ) -> T:
        """What the work comes to in a thread.

        Args:
            late: is given, in a thread of the pool, what the work comes to when nobody waits for it any more.

        Raises:
            Unavailable: it took too long, or stood still for too long. It may still run, if it had begun.
        """
        doing = _Doing(work)
        begun = self._threads.submit(doing, *args)
        running, handed = asyncio.wrap_future(begun), False
        try:
            async with asyncio.timeout(self._deadline):
                if self._standstill is not None:
                    await self._while_it_goes_on(running, doing, self._standstill)
                found = await running
            handed = True
            return found
        except TimeoutError as error:
            if running.done() and not running.cancelled():
                handed = True
                return running.result()
            raise Unavailable(f"no {self._name} within {self._deadline:g} s; try again later") from error
        finally:
            # What waits for a thread never runs. Also who is cancelled here does not wait any more. The
            # thread is told at once: what is chained to it hears of it in another turn of the loop.
            begun.cancel()
            running.cancel()
            if late is not None and not handed:
                begun.add_done_callback(lambda ended: self._threads.submit(_hand_over, late, ended))

    async def _while_it_goes_on(self, running: asyncio.Future[T], doing: _Doing[T], most: float) -> None:
        """Returns when work has ended. Raises Unavailable when it stands still."""
        done, since = doing.done(), time.monotonic()
        while not running.done():
            await asyncio.wait({running}, timeout=most / _LOOKS_PER_STANDSTILL)
            if done != (done := doing.done()) or doing.thread is None:
                since = time.monotonic()
            elif time.monotonic() - since >= most and not running.done():
                raise Unavailable(f"a {self._name} stood still for {most:g} s; try again later")


def _hand_over(late: Callable[[T], object], ended: Future[T]) -> None:
    if not ended.cancelled() and ended.exception() is None:
        late(ended.result())


class _Doing(Generic[T]):
    """One piece of work, of which can be told from outside whether it goes on."""

    def __init__(self, work: Callable[..., T]) -> None:
        self._work = work
        self.thread: int | None = None
        """The kernel's number of the thread that does it; None: none does yet."""

    def __call__(self, *args: object) -> T:
        self.thread = threading.get_native_id()
        return self._work(*args)

    def done(self) -> tuple[str, ...]:
        """How often its thread gave up its core, and lost it. One that computes, or waits for a disk that is
        at it, does; one that waits for a file system which does not answer never does."""
        if self.thread is None:
            return ()
        try:
            told = Path(f"/proc/self/task/{self.thread}/status").read_text().splitlines()
        except OSError:
            told = []
        # Where a kernel does not say it, work counts as going on.
        return tuple(line for line in told if "ctxt_switches" in line) or (str(time.monotonic()),)


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

VOLUME_LOOKS = Pool("answer of the data directory", 4, 60.0)
"""The same of the volume that training goes on on, whatever becomes of the checkpoints' storage."""

TRANSFERS = Pool("transfer of a checkpoint", 16, 6 * 3600.0, 1800.0)
"""Checkpoints of a trainer that are saved and loaded, of which one may be a terabyte. What waits for a client
of an object store never stands still: it looks each second, and the client has deadlines of its own. A file
system that sends a file when it is closed has half an hour for the largest."""
