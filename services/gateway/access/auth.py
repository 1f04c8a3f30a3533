"""Who is calling: API keys and their owners.

Invariant: keys are kept and compared as SHA-256 digests, so neither memory nor timing gives a
key away, and an empty or unreadable keys file lets nobody in.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections.abc import Callable
from pathlib import Path

from services.common.contract.errors import Unauthenticated

log = logging.getLogger(__name__)

_CHECK_EVERY_S = 1.0
_OWNER = re.compile(r"[0-9A-Za-z][0-9A-Za-z._@-]{0,63}")


def parse_keys(text: str) -> dict[bytes, str]:
    """Entries of a keys file: one key per line, optionally a space and the owner's name.

    A key without a name is owned by "key-" and the start of its digest. Blank lines and lines that
    start with "#" are skipped.

    Raises:
        ValueError: a name has characters that a name must not have, or a line has more than two words.
    """
    owners = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        digest = hashlib.sha256(words[0].encode()).digest()
        owner = words[1] if len(words) > 1 else f"key-{digest.hex()[:12]}"
        if len(words) > 2 or _OWNER.fullmatch(owner) is None:
            raise ValueError(f"line {number}: expected a key and optionally a space and a name")
        owners[digest] = owner
    return owners


class KeyRing:
    """The keys of a file, read again when the file changes."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Reads the file.

        Raises:
            OSError: the file cannot be read.
            ValueError: a line is not a key and a name.
        """
        self._path = path
        self._clock = clock
        self._stamp = self._file_stamp()
        self._owners = parse_keys(path.read_text())
        self._checked = clock()
        if not self._owners:
            log.warning("%s holds no key: every request will be refused", path)

    def owner_of(self, key: str | None) -> str:
        """Name of the key's owner.

        Raises:
            Unauthenticated: no key, or none of this cluster's.
        """
        if not key:
            raise Unauthenticated(
                "no API key: set TINKER_API_KEY (HTTP header X-API-Key, gRPC metadata x-api-key)"
            )
        self._refresh()
        # What a look-up gives away by its time is of the digest, from which no key follows.
        owner = self._owners.get(hashlib.sha256(key.encode()).digest())
        if owner is None:
            raise Unauthenticated("the API key is not one of this cluster's: ask its operator for a key")
        return owner

    def _refresh(self) -> None:
        now = self._clock()
        if now - self._checked < _CHECK_EVERY_S:
            return
        self._checked = now
        try:
            stamp = self._file_stamp()
            if stamp == self._stamp:
                return
            self._owners = parse_keys(self._path.read_text())
            self._stamp = stamp
            log.info("read %d API keys from %s", len(self._owners), self._path)
        except (OSError, ValueError) as error:
            # A file that is being replaced, or was mistyped, must not lock everybody out.
            log.error("keeping the API keys read before: %s: %s", self._path, error)

    def _file_stamp(self) -> tuple[int, int, int]:
        status = self._path.stat()
        return (status.st_mtime_ns, status.st_size, status.st_ino)
