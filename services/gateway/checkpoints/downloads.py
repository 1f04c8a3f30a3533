"""Downloads of exports by signed URLs.

A URL names one file of one version and a time; its signature is an HMAC-SHA256 of these with a key that all
gateways share. Invariants: nothing is served but what a signature names, while its time lasts and the
checkpoint exists; and no file is held in memory.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, BinaryIO
from urllib.parse import quote, urlencode

import redis.asyncio

from services.common.contract import ids
from services.common.contract.errors import InvalidRequest, NotFound, PermissionDenied, Unavailable
from services.common.process.pools import READS
from services.common.state import keys
from services.common.storage.base import Key, Storage
from services.gateway.access.gate import Gate
from services.gateway.checkpoints.checkpoints import Checkpoints
from services.gateway.records.checkpoint import CheckpointStore, key_of

URL_S = 3600
"""How long a URL is good for. The SDK has new ones made five minutes before the end."""
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

    def __init__(
        self,
        client: redis.asyncio.Redis,
        checkpoints: Checkpoints,
        store: CheckpointStore,
        storage: Storage,
        gate: Gate,
        public_url: str = "",
    ) -> None:
        self.public_url = public_url
        self._gate = gate
        self._redis = client
        self._checkpoints = checkpoints
        self._store = store
        self._storage = storage

    async def sign(self, owner: str, model_id: str, checkpoint_id: str) -> SignedPaths:
        """Signed paths of every file of an export. Raises as `read`."""
        key, files = await self._files(owner, model_id, checkpoint_id)
        expires, secret = int(time.time()) + URL_S, await self._secret()
        paths = {
            name: f"{quote(f'{key.path}/{name}')}?"
            + urlencode({"expires": expires, "signature": _signature(secret, key, name, expires)})
            for name in files
        }
        return SignedPaths(paths, expires)

    async def read(
        self, owner: str, model_id: str, checkpoint_id: str
    ) -> AsyncGenerator[tuple[str, Download], None]:
        """Every file of an export, by name. Each is to be read to its end, and is closed then.

        Raises:
            InvalidRequest: the checkpoint is no export.
            NotFound, PermissionDenied: as Checkpoints.readable.
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

    async def open(self, key: Key, name: str, expires: str, signature: str) -> Download:
        """The file that a signature names.

        Raises:
            PermissionDenied: it is not one of this cluster's, or its time is over.
            LimitReached: too many of the owner's files are read at present.
            NotFound: the checkpoint was deleted or expired.
        """
        if not (expires.isdecimal() and len(expires) < 16):
            raise PermissionDenied("this URL is not signed")
        expected = _signature(await self._secret(), key, name, int(expires))
        if not hmac.compare_digest(expected.encode(), signature.encode()):
            raise PermissionDenied("the signature of this URL is wrong")
        if int(expires) < time.time():
            raise PermissionDenied("this URL has expired; ask for external_weights_urls again", "url_expired")
        record = await self._store.get(key.model_id, key.checkpoint_id)
        if record is None or record.version != key.version:
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

    async def _secret(self) -> bytes:
        found: Any = await self._redis.get(keys.DOWNLOAD_SECRET)
        if found is None:
            await self._redis.set(keys.DOWNLOAD_SECRET, secrets.token_hex(32), nx=True)
            found = await self._redis.get(keys.DOWNLOAD_SECRET)
        return bytes(found)


def _signature(secret: bytes, key: Key, name: str, expires: int) -> str:
    return hmac.digest(secret, f"{key.path}\n{name}\n{expires}".encode(), "sha256").hex()
