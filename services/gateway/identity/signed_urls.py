"""URLs that take the place of an API key, for what an SDK fetches without one.

A URL names a path, a time, and the API key that asked for it; its signature is an HMAC-SHA256 of these with
a secret that all gateways share. Invariant: a path is let in while its time lasts and its API key is let in,
and only with a signature of exactly that path.
"""

from __future__ import annotations

import hmac
import secrets
import time
from typing import Any
from urllib.parse import quote, urlencode

import redis.asyncio

from services.common.contract.errors import PermissionDenied
from services.common.state import keys
from services.gateway.identity.key import Caller
from services.gateway.identity.ring import KeyRing

URL_S = 3600
"""How long a URL is good for. The SDK has new ones made five minutes before the end."""


class SignedUrls:
    """Signs and checks.

    Attributes:
        public_url: what URLs begin with; empty: as the request for them names the gateway.
    """

    def __init__(self, client: redis.asyncio.Redis, api_keys: KeyRing, public_url: str) -> None:
        self.public_url = public_url
        self._redis = client
        self._api_keys = api_keys

    async def sign(self, caller: Caller, paths: dict[str, str]) -> tuple[dict[str, str], float]:
        """The paths of the values with queries that let them in, by their keys, and when they end (Unix
        time)."""
        secret = await self._secret()
        expires = int(min(time.time() + URL_S, caller.until or float("inf")))

        def query(path: str) -> str:
            signature = _signature(secret, path, expires, caller.key_id)
            return urlencode({"expires": expires, "key": caller.key_id, "signature": signature})

        return {name: f"{quote(path)}?{query(path)}" for name, path in paths.items()}, expires

    async def owner(self, path: str, expires: str, key_id: str, signature: str) -> str:
        """The owner of the API key that asked for the URL.

        Raises:
            PermissionDenied: it is not one of this cluster's, its time is over, or its API key has ended.
        """
        if not (expires.isdecimal() and len(expires) < 16):
            raise PermissionDenied("this URL is not signed")
        expected = _signature(await self._secret(), path, int(expires), key_id)
        if not hmac.compare_digest(expected.encode(), signature.encode()):
            raise PermissionDenied("the signature of this URL is wrong")
        if int(expires) < time.time():
            raise PermissionDenied("this URL has expired; ask for a new one", "url_expired")
        owner = self._api_keys.owner_by_id(key_id)
        if owner is None:
            raise PermissionDenied("the API key that asked for this URL has ended", "url_expired")
        return owner

    async def _secret(self) -> bytes:
        found: Any = await self._redis.get(keys.DOWNLOAD_SECRET)
        if found is None:
            await self._redis.set(keys.DOWNLOAD_SECRET, secrets.token_hex(32), nx=True)
            found = await self._redis.get(keys.DOWNLOAD_SECRET)
        return bytes(found)


def _signature(secret: bytes, path: str, expires: int, key_id: str) -> str:
    return hmac.digest(secret, f"{path}\n{expires}\n{key_id}".encode(), "sha256").hex()
