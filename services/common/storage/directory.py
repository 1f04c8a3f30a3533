"""Directories that are published whole.

Invariant: a reader sees a directory complete or not at all, and what it saw survives a power cut: files
are written to a temporary directory beside the target, synced, and moved into place by one rename.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from services.common.storage.base import Writer

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def publish_directory(target: Path, files: Mapping[str, Writer], replace: bool) -> int:
    """Makes `target` a directory with these files. Returns their bytes. Blocking; call from a thread.

    Args:
        replace: swap it for an existing directory of that name.

    Raises:
        FileExistsError: the directory exists and `replace` is false.
        OSError: the disk is full, or another failure; the target is as it was.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        size = 0
        for name, write in files.items():
            path = temporary / name
            write(path)
            _sync(path)
            size += path.stat().st_size
        temporary.chmod(0o755)
        _sync(temporary)
        _move(temporary, target, replace)
        _sync(target.parent)
        return size
    finally:
        # Holds what was replaced, or what could not be published.
        shutil.rmtree(temporary, ignore_errors=True)


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
