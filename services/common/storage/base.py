"""Storage of checkpoints and exports: directories of files that are published whole and never change.

A stored directory is named by a `Key`: model, checkpoint id, and the version, which is the seq_id of the
operation that saved it. Another save under the same name is another version, so nothing is ever replaced.

Invariants: a reader finds a version complete or not at all; what a failed or interrupted save leaves behind
is never found and is removed by `clean`; a version that was deleted is gone at once for whoever looks for it,
and after `GRACE_S` for those who are reading it or know it by its number, as a load that was accepted before
does when it is repeated. What a deletion costs depends on its version alone, not on what
else is stored.
"""

from __future__ import annotations

import errno
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from services.common.contract import ids
from services.common.contract.errors import Internal, InvalidRequest, StorageFull, TinsmithError

Writer = Callable[[Path], object]
"""Writes one file at the path it is given. May be called again; writes the same each time."""
GoOn = Callable[[], None]
"""Asked between the parts of long work; what it raises ends the work."""

GRACE_S = 3600.0
"""How long the files of a deleted version stay for those who read them."""
ABANDONED_S = 24 * 3600.0
"""Files of a save that are older than this belong to none that still goes on."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# What object stores say. They have no error numbers.
_FULL_CODES = ("XMinioStorageFull", "QuotaExceeded", "InsufficientStorage", "InsufficientCapacity")


class LocalDiskFull(OSError):
    """A disk of this machine has no space for files that are on their way to or from a storage."""


@contextmanager
def on_local_disk(directory: Path) -> Iterator[None]:
    """Within it files are written to a directory of this machine, and to no storage.

    Raises:
        LocalDiskFull: its disk has no space for them.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL or isinstance(error, LocalDiskFull):
            raise
        where = f"no space left on the disk of {directory} on {os.uname().nodename}"
        raise LocalDiskFull(error.errno, where) from error


@dataclass(frozen=True)
class Key:
    """Name of a stored directory."""

    model_id: str
    checkpoint_id: str
    version: int

    def __post_init__(self) -> None:
        """Checks that the key is safe as a path.

        Raises:
            InvalidRequest: an id does not follow its grammar.
        """
        check_name(self.model_id, self.checkpoint_id)
        if self.version < 0:
            raise InvalidRequest(f"{self.version} is not a version")

    @property
    def path(self) -> str:
        """Relative path, "/" between its parts."""
        return f"{self.model_id}/{self.checkpoint_id}/{self.version}"


class Storage(ABC):
    """Where versions are kept. Every method blocks; call from a thread.

    What is read of a version raises DataLoss where it is stored, and what says which files it has is damaged.
    """

    @abstractmethod
    def publish(self, key: Key, files: Mapping[str, Writer]) -> int:
        """Stores files under a key and returns their bytes. A key that is stored whole is left as it is.

        Raises:
            OSError: it could not be stored; nothing can be found under the key. See `failure`.
        """

    @abstractmethod
    def copy(self, source: Key, target: Key, go_on: GoOn = lambda: None) -> int | None:
        """Stores the files of one key under another, too, by reference or within the store; their bytes, or
        None when there are none. Each of the two is deleted by itself. A target that is stored already is
        left as it is.

        Args:
            go_on: asked before each file, and before each piece of one that passes through this process.

        Raises:
            OSError: it could not be stored; nothing can be found under the target, nor if `go_on` raised.
        """

    @abstractmethod
    def versions(self, model_id: str, checkpoint_id: str) -> list[int]:
        """Versions of a name that are stored, in order."""

    @abstractmethod
    def files(self, key: Key) -> dict[str, int] | None:
        """Names and bytes of the files; None when nothing is stored under the key."""

    @abstractmethod
    def local(self, key: Key, only: Collection[str] | None = None) -> AbstractContextManager[Path | None]:
        """A directory of this machine with the files, for as long as the context lasts, also those that are
        still there of a version that was deleted. None when nothing is stored under the key.

        Args:
            only: names of those that are wanted, as far as there are such; others need not be there.
        """

    @abstractmethod
    def open(self, key: Key, name: str) -> BinaryIO:
        """A file, to be read from its start.

        Raises:
            FileNotFoundError: there is no such file.
        """

    @abstractmethod
    def delete(self, key: Key, grace: float = GRACE_S) -> float | None:
        """Makes a version impossible to find, and takes its files away once nobody can be reading them.

        Args:
            grace: seconds after the first call until the files go.

        Returns:
            None when nothing of it is left, else seconds after which this is to be called again.
        """

    @abstractmethod
    def clean(self, abandoned: float = ABANDONED_S) -> None:
        """Removes what saves that broke off longer than `abandoned` seconds ago left behind.

        Looks at all that is stored: for once a day. What does not look like this storage's own is left alone.
        Any number of processes may do this.
        """


def check_name(model_id: str, checkpoint_id: str) -> None:
    """Checks the name of a checkpoint.

    Raises:
        InvalidRequest: an id does not follow its grammar.
    """
    if not ids.is_model_id(model_id):
        raise InvalidRequest(f"{model_id[:200]!r} is not a model id")
    ids.check_checkpoint_id(checkpoint_id)


def os_error(text: str) -> OSError:
    """The error of the operating system in the words of a library that has its number in the text only."""
    number = re.search(r"(?:os error|Errno) (\d+)", text)
    return OSError(int(number[1]) if number else errno.EIO, text)


def failure(error: OSError, what: str) -> TinsmithError:
    """The reported error of something that could not be written.

    Args:
        what: names it, for the beginning of a sentence.
    """
    if isinstance(error, LocalDiskFull):
        return StorageFull(
            f"{what} was not written: {error.strerror}, which it passes; nothing else was lost: have the "
            "operator free space there, then save again"
        )
    if error.errno in _FULL or any(code in str(error) for code in _FULL_CODES):
        return StorageFull(
            f"{what} was not written, because the storage is full ({error}); nothing else was lost: delete "
            "checkpoints or have the operator add space, then save again"
        )
    return Internal(f"{what} was not written: {type(error).__name__}: {error}")
