"""The volume that the data directory is on: which it is, and what is free there.

Invariants: a volume that is mounted in place of another is not taken for it, nor is the directory below one
that is not mounted any more: no training state, checkpoint or snapshot is written there. One thread at most
asks what is free, and nobody waits for that longer than `_PATIENCE_S`, also while the volume does not answer.
"""

from __future__ import annotations

import math
import shutil
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TypeVar

from services.common.contract.errors import Internal, StorageAway, Unavailable
from services.common.process.pools import VOLUME_LOOKS
from services.common.process.threads import WorkerThread
from services.common.storage.data_dir import DataDir
from services.common.storage.directory import written_once

T = TypeVar("T")

_PATIENCE_S = 1.0


def identified(data: DataDir) -> str:
    """Which volume this is, by a file that it has from now on."""
    data.root.mkdir(parents=True, exist_ok=True)
    return written_once(data.volume_id, uuid.uuid4().hex).strip()


def volume_of(data: DataDir) -> str:
    """Which volume this is; empty where nothing was written to it."""
    try:
        return data.volume_id.read_text(encoding="ascii", errors="replace").strip()
    except FileNotFoundError:
        return ""


class Volume:
    """The volume that a data directory was on when this was made.

    Attributes:
        id: which it is.
    """

    def __init__(self, data: DataDir) -> None:
        self._data = data
        self.id = identified(data)

    def check(self) -> None:
        """Raises StorageAway when the data directory is on it no more, or cannot be read. May hang."""
        try:
            found = volume_of(self._data)
        except OSError as error:
            raise StorageAway(f"{self._data.root} cannot be read at present: {error}") from error
        if found != self.id:
            raise StorageAway(
                f"{self._data.root} is not the volume any more that it was when this trainer started: mount "
                "that one there again, or start the trainer again on this one"
            )

    async def answers(self) -> None:
        """As `check`; one that hangs is away within a minute."""
        await self.asked(self.check)

    async def found(self) -> str:
        """As `volume_of`, with what `asked` raises."""
        return await self.asked(partial(volume_of, self._data))

    async def asked(self, work: Callable[[], T]) -> T:
        """What a look into it comes to, in a thread.

        Raises:
            StorageAway: it took a minute.
        """
        try:
            return await VOLUME_LOOKS.run(work)
        except Unavailable as error:
            raise StorageAway(f"{self._data.root} hangs: {error.message}") from error


def other_volume(data: DataDir, wanted: str) -> Internal:
    """Says that what is missing here is on another volume."""
    return Internal(
        f"its snapshot is on another volume than {data.root}: mount that one there. If it is lost for good, "
        f"write {wanted} into {data.volume_id}: what was on it is then reported as lost",
        "other_volume",
    )


class FreeBytes:
    """Thread-safe.

    Args:
        directory: on the volume, which may hang.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._thread = WorkerThread("free bytes")
        self._lock = threading.Lock()
        self._answer: Future[int] | None = None

    def read(self) -> float:
        """Free bytes; NaN where the volume is not there, or does not answer at once."""
        with self._lock:
            if self._answer is None or self._answer.done():
                self._answer = self._thread.submit(lambda: shutil.disk_usage(self._directory).free)
            answer = self._answer
        try:
            return answer.result(_PATIENCE_S)
        except OSError:
            # A wait that took too long is one, too.
            return math.nan
