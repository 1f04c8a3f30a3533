"""Downloads of exports by signed URLs.

A URL names one file of one version. Invariants: nothing is served but what a signature names, while its URL
is good (`identity/signed_urls.py`), and the owner of the API key that asked for it may read the checkpoint;
and no file is held in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import BinaryIO

from services.common.contract import ids
from services.common.contract.errors import InvalidRequest, NotFound, Unavailable
from services.common.process.pools import READS
from services.common.storage.base import Key, Storage
from services.gateway.access.gate import Gate
from services.gateway.checkpoints.checkpoints import Checkpoints
from services.gateway.identity.key import Caller
from services.gateway.identity.signed_urls import SignedUrls
from services.gateway.records.checkpoint import key_of

_PIECE = 1 << 20


@dataclass(frozen=True)
class SignedPaths:
    """Paths with queries by file name, below where downloads are served, and when they end (Unix time)."""

    paths: dict[str, str]
    expires: float


@dataclass(frozen=True)
class Download:
    """An open file and its bytes. To be closed."""

    size: int
    file: BinaryIO
    counted: ExitStack

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """The content."""
        while piece := await READS.run(self.file.read, _PIECE):
            yield piece

    async def close(self) -> None:
        """Closes the file, also when the reader went away."""
        self.counted.close()
        await asyncio.shield(READS.run(self.file.close))


class Downloads:
    """Signs and serves."""

    def __init__(self, urls: SignedUrls, checkpoints: Checkpoints, storage: Storage, gate: Gate) -> None:
        self._urls = urls
        self._gate = gate
        self._checkpoints = checkpoints
        self._storage = storage

    async def sign(self, caller: Caller, model_id: str, checkpoint_id: str) -> SignedPaths:
        """Signed paths of every file of an export. Raises as `read`."""
        key, files = await self._files(caller.owner, model_id, checkpoint_id)
        paths = {name: f"{key.path}/{name}" for name in files}
        return SignedPaths(*await self._urls.sign(caller, paths))

    async def read(
        self, owner: str, model_id: str, checkpoint_id: str
    ) -> AsyncGenerator[tuple[str, Download], None]:
        """Every file of an export, by name. Each is to be read to its end, and is closed then.

        Raises:
            InvalidRequest: the checkpoint is no export.
            NotFound: as Checkpoints.readable.
            Unavailable: the storage cannot be reached.
        """
        key, files = await self._files(owner, model_id, checkpoint_id)
        for name in files:
            found = await self._opened(owner, key, name)
            try:
                yield name, found
            finally:
                await found.close()

    async def _files(self, owner: str, model_id: str, checkpoint_id: str) -> tuple[Key, list[str]]:
        """Where an export is kept, and its files."""
        if not ids.check_checkpoint_id(checkpoint_id).startswith("external_weights/"):
            raise InvalidRequest(
                f"{checkpoint_id} cannot be downloaded; save_weights_external writes what can"
            )
        record = await self._checkpoints.readable(owner, model_id, checkpoint_id)
        key = key_of(record)
        try:
            files = await READS.run(self._storage.files, key)
        except OSError as error:
            raise Unavailable(f"the checkpoint storage cannot be reached: {error}") from error
        if files is None:
            raise NotFound(f"{ids.tinker_path(model_id, checkpoint_id)} does not exist any more")
        return key, sorted(files)

    async def open(self, key: Key, name: str, expires: str, key_id: str, signature: str) -> Download:
        """The file that a signature names.

        Args:
            key_id: of the API key that asked for the URL.

        Raises:
            PermissionDenied: it is not one of this cluster's, its time is over, or its API key has ended.
            LimitReached: too many of the owner's files are read at present.
            NotFound: the checkpoint was deleted, expired, or is not published any more.
        """
        reader = await self._urls.owner(f"{key.path}/{name}", expires, key_id, signature)
        record = await self._checkpoints.readable(reader, key.model_id, key.checkpoint_id)
        if record.version != key.version:
            raise NotFound(f"{ids.tinker_path(key.model_id, key.checkpoint_id)} does not exist any more")
        return await self._opened(record.owner, key, name)

    async def _opened(self, owner: str, key: Key, name: str) -> Download:
        try:
            with ExitStack() as counted:
                counted.enter_context(self._gate.download(owner))
                size, file = await READS.run(self._open, key, name)
                return Download(size, file, counted.pop_all())
        except FileNotFoundError as error:
            raise NotFound(f"{name!r} does not exist any more") from error
        except OSError as error:
            raise Unavailable(f"the checkpoint storage cannot be reached: {error}") from error

    def _open(self, key: Key, name: str) -> tuple[int, BinaryIO]:
        size = (self._storage.files(key) or {}).get(name, 0)
        return size, self._storage.open(key, name)
