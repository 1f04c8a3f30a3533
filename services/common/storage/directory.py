"""Directories that are published whole, and storage made of them.

Invariant: a reader sees a directory complete or not at all, and what it saw survives a power cut: files
are written to a temporary directory beside the target, synced, and moved into place by one rename.

A stored version is the directory <root>/<model>/<kind>/<name>/<version>. Deleting renames it out of sight;
what has a dot in front is nobody's to find.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import tempfile
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from services.common.process import clock, failpoints
from services.common.storage.base import ABANDONED_S, GRACE_S, GoOn, Key, Storage, Writer, check_name

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_DELETED = ".deleted-"
_MOST_RESERVED = 1 << 30
_PIECE = 16 << 20
_NO_LINKS = {errno.EPERM, errno.EMLINK, errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS}


def reserve(total: int) -> int:
    """Bytes of a volume of `total` bytes that new saves leave free, for what keeps running ones going."""
    return min(_MOST_RESERVED, total // 50)


def check_reserve(directory: Path) -> None:
    """Raises OSError when nothing may be written there that can be done without."""
    volume = shutil.disk_usage(directory)
    if volume.free < reserve(volume.total):
        raise OSError(errno.ENOSPC, f"only {volume.free} bytes of the volume are free", str(directory))


def publish_directory(
    target: Path, files: Mapping[str, Writer], replace: bool, leave_reserve: bool = False
) -> int:
    """Makes `target` a directory with these files. Returns their bytes. Blocking; call from a thread.

    Args:
        replace: swap it for an existing directory of that name.
        leave_reserve: write nothing on a volume that is nearly full. For what can be done without: what
            keeps running work safe is written as long as there is any space.

    Raises:
        FileExistsError: the directory exists and `replace` is false.
        OSError: the disk is full, or another failure; the target is as it was.
    """
    temporary = _temporary(target)
    try:
        if leave_reserve:
            check_reserve(temporary)
        size = 0
        for name, write in files.items():
            path = temporary / name
            write(path)
            _sync(path)
            size += path.stat().st_size
        _sync(temporary)
        failpoints.hit("trainer.before_rename")
        _move(temporary, target, replace)
        failpoints.hit("trainer.after_rename")
        _sync(target.parent)
        return size
    finally:
        # Holds what was replaced, or what could not be published.
        shutil.rmtree(temporary, ignore_errors=True)


def written_once(path: Path, content: str) -> str:
    """What a file says, which is this if it is not there yet, whoever else writes it at the same time."""
    if not path.exists():
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        try:
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(content)
                file.flush()
                os.fsync(descriptor)
            # Fails when another process was first.
            with suppress(FileExistsError):
                os.link(temporary, path)
        finally:
            Path(temporary).unlink()
    return path.read_text(encoding="ascii", errors="replace")


def linked_files(directory: Path, go_on: GoOn = lambda: None) -> dict[str, Writer]:
    """Writers of the files of a published directory: they link them where the file system can, else copy.
    Each of them may be long, and asks whether to go on."""
    return {path.name: partial(_link, go_on, path) for path in directory.iterdir()}


def _link(go_on: GoOn, source: Path, target: Path) -> None:
    go_on()
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        with source.open("rb") as file, target.open("wb") as copy:
            while piece := file.read(_PIECE):
                go_on()
                copy.write(piece)


def directory_bytes(target: Path) -> int:
    """Bytes of the files of a published directory. Blocking."""
    return sum(path.stat().st_size for path in target.iterdir())


def delete_directory(target: Path) -> None:
    """Deletes a directory, unless it is gone. Blocking.

    It goes under another name first, ".<name>-deleted", which a deletion that breaks off may leave behind.

    Raises:
        OSError: something of it cannot be deleted.
    """
    doomed = target.with_name(f".{target.name.lstrip('.')}-deleted")
    with suppress(FileNotFoundError):
        shutil.rmtree(doomed)
    with suppress(FileNotFoundError):
        target.rename(doomed)
        shutil.rmtree(doomed)


class DirectoryStorage(Storage):
    """Versions below one directory."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def publish(self, key: Key, files: Mapping[str, Writer]) -> int:
        if (stored := self.files(key)) is None:
            with suppress(FileExistsError):
                return publish_directory(self._path(key), files, replace=False, leave_reserve=True)
            stored = self.files(key) or {}
        return sum(stored.values())

    def copy(self, source: Key, target: Key, go_on: GoOn = lambda: None) -> int | None:
        with _opened(self._path(source)) as directory:
            return None if directory is None else self.publish(target, linked_files(directory, go_on))

    def versions(self, model_id: str, checkpoint_id: str) -> list[int]:
        check_name(model_id, checkpoint_id)
        with suppress(FileNotFoundError):
            names = [path.name for path in (self._root / model_id / checkpoint_id).iterdir()]
            return sorted(int(name) for name in names if name.isdigit())
        return []

    def files(self, key: Key) -> dict[str, int] | None:
        with suppress(FileNotFoundError):
            return {path.name: path.stat().st_size for path in self._path(key).iterdir()}
        return None

    @contextmanager
    def local(self, key: Key, only: Collection[str] | None = None) -> Iterator[Path | None]:
        with _opened(self._path(key), self._deleted(key)) as directory:
            yield directory

    def open(self, key: Key, name: str) -> BinaryIO:
        if name not in (self.files(key) or ()):
            raise FileNotFoundError(f"{key.path} has no file {name!r}")
        return (self._path(key) / name).open("rb")

    def delete(self, key: Key, grace: float = GRACE_S) -> float | None:
        path = self._path(key)
        with suppress(FileNotFoundError):
            deleted_at = clock.to_note()
            os.utime(path, (deleted_at, deleted_at))
            path.rename(path.with_name(f"{_DELETED}{key.version}-{uuid.uuid4().hex}"))
        left = None
        for doomed in self._deleted(key):
            with suppress(FileNotFoundError):
                rest = doomed.stat().st_mtime + grace - clock.to_judge()
                if rest <= 0:
                    shutil.rmtree(doomed)
                else:
                    left = max(rest, left or 0.0)
        with suppress(OSError):
            # Only when it is empty.
            path.parent.rmdir()
        return left

    def clean(self, abandoned: float = ABANDONED_S) -> None:
        now = clock.to_judge()
        for path in self._root.glob("*/*/*/.*"):
            with suppress(FileNotFoundError):
                if not path.name.startswith(_DELETED) and now - path.stat().st_mtime > abandoned:
                    shutil.rmtree(path)
            with suppress(OSError):
                path.parent.rmdir()

    def _path(self, key: Key) -> Path:
        return self._root / key.path

    def _deleted(self, key: Key) -> Iterator[Path]:
        """Where the files of a version are that was deleted, while they are there. Looks when it is asked."""
        yield from self._path(key).parent.glob(f"{_DELETED}{key.version}-*")


@contextmanager
def _opened(path: Path, instead: Iterable[Path] = ()) -> Iterator[Path | None]:
    """A directory, or the first of others that is there, for as long as the context lasts."""
    for candidate in chain([path], instead):
        with suppress(FileNotFoundError):
            descriptor = os.open(candidate, os.O_RDONLY | os.O_DIRECTORY)
            break
    else:
        yield None
        return
    try:
        # Stays this directory when it is deleted, which moves it.
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def clean_abandoned(parent: Path, abandoned: float = ABANDONED_S, names: str = ".*") -> None:
    """Removes what writes and deletions in a directory that broke off so long ago left there, under names of
    this pattern. Blocking."""
    now = clock.to_judge()
    for path in list(parent.glob(names)) if parent.is_dir() else []:
        with suppress(FileNotFoundError):
            if now - path.stat().st_mtime > abandoned:
                shutil.rmtree(path)


def _temporary(target: Path) -> Path:
    """A new directory beside `target`, whose parents are made."""
    while True:
        try:
            _make(target.parent)
            return Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        except FileNotFoundError:
            # A sweep removed a parent because it was empty.
            continue


def _make(directory: Path) -> None:
    """Makes a directory and its parents, for good."""
    if not directory.is_dir():
        _make(directory.parent)
        directory.mkdir(exist_ok=True)
        _sync(directory.parent)


def _move(source: Path, target: Path, replace: bool) -> None:
    try:
        source.rename(target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if not replace:
            raise FileExistsError(errno.EEXIST, "exists already", str(target)) from error
        _exchange(source, target)


def _exchange(source: Path, target: Path) -> None:
    """Swaps two directories, in one step where the file system can."""
    libc = ctypes.CDLL(None, use_errno=True)
    with suppress(AttributeError):
        paths = (os.fsencode(source), os.fsencode(target))
        if libc.renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0:
            return
    old = source.with_name(f"{source.name}-old")
    target.rename(old)
    try:
        source.rename(target)
    except OSError:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
