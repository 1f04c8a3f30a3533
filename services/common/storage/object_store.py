"""Storage in an object store, by fsspec.

An object store renames nothing, but writes one object whole or not at all. The files of a version go below a
prefix that no other save uses, <root>/<key>/<random>/, and <root>/<key>/manifest.json, written last, says
which prefix and which files the version is. Readers go by the manifest alone. Deleting copies it to
<root>/<key>/former.json for those who know the version, writes the time as <root>/<key>/deleted, then removes
the manifest, and later all below the key; `clean` removes what no manifest names.
"""

from __future__ import annotations

import errno
import logging
import shutil
import tempfile
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import Any, BinaryIO, ParamSpec, TypeVar, cast

import msgspec
from fsspec import AbstractFileSystem

from services.common.contract.errors import DataLoss, TinsmithError
from services.common.process import clock
from services.common.storage.base import (
    ABANDONED_S,
    GRACE_S,
    GoOn,
    Key,
    Storage,
    Writer,
    check_name,
    on_local_disk,
)
from services.common.storage.directory import clean_abandoned

log = logging.getLogger(__name__)

_MANIFEST, _FORMER, _DELETED = "manifest.json", "former.json", "deleted"
_T = TypeVar("_T")
_P = ParamSpec("_P")
_READ_BYTES = 4 * 1024**2
# Under these names file systems of fsspec tell when an object was written.
_TIMES = ("LastModified", "last_modified", "mtime", "updated", "created")


class Manifest(msgspec.Struct, frozen=True):
    """What a version is: the prefix its files are below, and their names and bytes."""

    prefix: str
    files: dict[str, int]


def _with_os_errors(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Turns errors of a client library that are none of the operating system's kind into such."""

    @wraps(method)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return method(*args, **kwargs)
        except (OSError, TinsmithError):
            raise
        except Exception as error:
            raise OSError(errno.EIO, f"the object store failed: {type(error).__name__}: {error}") from error

    return wrapped


class ObjectStorage(Storage):
    """Versions below one prefix of a bucket.

    Args:
        filesystem: without a cache of listings.
        root: bucket and prefix, without the protocol.
        staging: directory of this machine for files on their way.
    """

    def __init__(self, filesystem: AbstractFileSystem, root: str, staging: Path) -> None:
        self._fs = filesystem
        self._root = root.rstrip("/")
        self._staging = staging

    @_with_os_errors
    def publish(self, key: Key, files: Mapping[str, Writer]) -> int:
        manifest = self._whole(key)
        if manifest is None:
            manifest = Manifest(uuid.uuid4().hex, {})
            with self._written_whole(key, manifest), self._temporary() as directory:
                for name, write in files.items():
                    path = directory / name
                    with on_local_disk(self._staging):
                        write(path)
                    self._fs.put_file(str(path), self._file(key, manifest, name))
                    manifest.files[name] = path.stat().st_size
                    path.unlink()
        return sum(manifest.files.values())

    @_with_os_errors
    def copy(self, source: Key, target: Key, go_on: GoOn = lambda: None) -> int | None:
        origin, manifest = self._manifest(source), self._whole(target)
        if manifest is None:
            if origin is None:
                return None
            manifest = Manifest(uuid.uuid4().hex, origin.files)
            with self._written_whole(target, manifest):
                for name in manifest.files:
                    go_on()
                    self._fs.cp_file(self._file(source, origin, name), self._file(target, manifest, name))
        return sum(manifest.files.values())

    @contextmanager
    def _written_whole(self, key: Key, manifest: Manifest) -> Iterator[None]:
        """Within it the files of a manifest are written. At its end they are the version, after an error they
        are taken away."""
        try:
            yield
            self._fs.pipe_file(self._object(key, _MANIFEST), msgspec.json.encode(manifest))
        except BaseException:
            with suppress(Exception):
                self._fs.rm(self._object(key, manifest.prefix), recursive=True)
            raise

    @_with_os_errors
    def versions(self, model_id: str, checkpoint_id: str) -> list[int]:
        check_name(model_id, checkpoint_id)
        found = (
            Key(model_id, checkpoint_id, int(name))
            for name in self._list(f"{self._root}/{model_id}/{checkpoint_id}")
            if name.isdigit()
        )
        return sorted(key.version for key in found if self._is_stored(key))

    @_with_os_errors
    def files(self, key: Key) -> dict[str, int] | None:
        manifest = self._manifest(key)
        return None if manifest is None else manifest.files

    @contextmanager
    def local(self, key: Key, only: Collection[str] | None = None) -> Iterator[Path | None]:
        manifest = self._manifest(key) or self._manifest(key, _FORMER)
        if manifest is None:
            yield None
            return
        with self._temporary() as directory:
            names = [name for name in manifest.files if only is None or name in only]
            self._download(key, manifest, names, directory)
            yield directory

    @_with_os_errors
    def _download(self, key: Key, manifest: Manifest, names: Iterable[str], directory: Path) -> None:
        for name in names:
            try:
                with on_local_disk(self._staging):
                    self._fs.get_file(self._file(key, manifest, name), str(directory / name))
            except FileNotFoundError as error:
                raise DataLoss(f"{key.path} lacks its file {name}: {error}") from error

    @_with_os_errors
    def open(self, key: Key, name: str) -> BinaryIO:
        manifest = self._manifest(key)
        if manifest is None or name not in manifest.files:
            raise FileNotFoundError(f"{key.path} has no file {name!r}")
        path = self._file(key, manifest, name)
        return cast(BinaryIO, self._fs.open(path, "rb", block_size=_READ_BYTES, cache_type="readahead"))

    @_with_os_errors
    def delete(self, key: Key, grace: float = GRACE_S) -> float | None:
        mark = self._object(key, _DELETED)
        if self._is_stored(key):
            if (manifest := self._whole(key)) is not None:
                self._fs.pipe_file(self._object(key, _FORMER), msgspec.json.encode(manifest))
            self._fs.pipe_file(mark, repr(clock.to_note()).encode())
            with suppress(FileNotFoundError):
                self._fs.rm_file(self._object(key, _MANIFEST))
        try:
            left = float(self._fs.cat_file(mark)) + grace - clock.to_judge()
        except FileNotFoundError:
            return None
        if left > 0:
            return left
        for name in self._list(f"{self._root}/{key.path}"):
            if name not in (_DELETED, _MANIFEST):
                with suppress(FileNotFoundError):
                    self._fs.rm(self._object(key, name), recursive=True)
        # The mark goes last, so that a deletion that breaks off is gone on with.
        with suppress(FileNotFoundError):
            self._fs.rm_file(mark)
        return None

    @_with_os_errors
    def clean(self, abandoned: float = ABANDONED_S) -> None:
        for model in self._list(self._root):
            versions: dict[str, dict[str, float]] = {}
            found: dict[str, dict[str, Any]] = self._fs.find(f"{self._root}/{model}", detail=True)
            for path, info in found.items():
                parts = path[len(self._root) + len(model) + 2 :].split("/", 3)
                if len(parts) == 4 and parts[2].isdigit():
                    version = f"{model}/{'/'.join(parts[:3])}"
                    versions.setdefault(version, {})[parts[3]] = self._written(path, info)
            for version, objects in versions.items():
                self._clean_version(version, objects, abandoned)
        # What processes of this machine that were killed had on its way.
        clean_abandoned(self._staging, abandoned, "*")

    def _clean_version(self, path: str, objects: Mapping[str, float], abandoned: float) -> None:
        """Removes what belongs to no manifest of one version, whose objects were written at these times."""
        if _DELETED in objects:
            return
        try:
            manifest = self._read(f"{self._root}/{path}/{_MANIFEST}") if _MANIFEST in objects else None
        except DataLoss as error:
            # Which of the files it names nobody knows.
            log.warning("%s is left as it is: %s", path, error)
            return
        if _MANIFEST in objects and manifest is None:
            return
        prefixes: dict[str, float] = {}
        for name, written in objects.items():
            prefix = name.partition("/")[0]
            prefixes[prefix] = max(written, prefixes.get(prefix, 0.0))
        for prefix in prefixes.keys() - {_MANIFEST, manifest.prefix if manifest else ""}:
            if clock.to_judge() - prefixes[prefix] > abandoned:
                with suppress(FileNotFoundError):
                    self._fs.rm(f"{self._root}/{path}/{prefix}", recursive=True)

    def _written(self, path: str, info: Mapping[str, Any]) -> float:
        found = next((info[name] for name in _TIMES if info.get(name) is not None), None)
        if found is None:
            found = self._fs.modified(path)
        if isinstance(found, str):
            found = datetime.fromisoformat(found)
        return found.timestamp() if isinstance(found, datetime) else float(found)

    @_with_os_errors
    def _manifest(self, key: Key, name: str = _MANIFEST) -> Manifest | None:
        return self._read(self._object(key, name))

    def _whole(self, key: Key) -> Manifest | None:
        """The manifest of a version; None also where it is damaged."""
        try:
            return self._manifest(key)
        except DataLoss as error:
            log.warning("%s", error)
            return None

    def _is_stored(self, key: Key) -> bool:
        """Whether there is a manifest, damaged or not."""
        try:
            return self._manifest(key) is not None
        except DataLoss:
            return True

    def _read(self, path: str) -> Manifest | None:
        try:
            data = self._fs.cat_file(path)
        except FileNotFoundError:
            return None
        try:
            return msgspec.json.decode(data, type=Manifest)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DataLoss(f"{path.removeprefix(self._root)[1:]} is damaged: {error}") from error

    def _list(self, path: str) -> list[str]:
        """Names of what is directly below a path."""
        try:
            found: list[str] = self._fs.ls(path, detail=False)
        except FileNotFoundError:
            return []
        return sorted(name.rstrip("/").rpartition("/")[2] for name in found)

    def _object(self, key: Key, name: str) -> str:
        return f"{self._root}/{key.path}/{name}"

    def _file(self, key: Key, manifest: Manifest, name: str) -> str:
        return f"{self._root}/{key.path}/{manifest.prefix}/{name}"

    @contextmanager
    def _temporary(self) -> Iterator[Path]:
        with on_local_disk(self._staging):
            self._staging.mkdir(parents=True, exist_ok=True)
            directory = Path(tempfile.mkdtemp(dir=self._staging))
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)
