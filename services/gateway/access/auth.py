"""Who is calling: API keys and their owners.

Invariants: keys are kept as SHA-256 digests, and looked up by them, so neither memory nor timing gives a key
away. A key that is no longer in the file is let in no more, whatever is wrong with the rest of the file; one
that cannot be read for a minute lets nobody in.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections.abc import Callable
from pathlib import Path

from services.common.contract.errors import Unauthenticated
from services.common.process.periodic import Periodic
from services.common.process.pools import READS

log = logging.getLogger(__name__)

_LOOK_S = 1.0
_DEADLINE_S = 30.0
_UNREADABLE_S = 60.0
_OWNER = re.compile(r"[0-9A-Za-z][0-9A-Za-z._@-]{0,63}")


def parse_keys(text: str) -> tuple[dict[bytes, str], list[int]]:
    """Owners by the digests of their keys, and the numbers of the lines that are wrong, which let nobody in.

    A line is a key and optionally a space and the owner's name. A key without a name is owned by "key-" and
    the start of its digest. Blank lines and lines that start with "#" are skipped.
    """
    owners: dict[bytes, str] = {}
    wrong = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        digest = _digest(words[0])
        owner = words[1] if len(words) > 1 else f"key-{digest.hex()[:12]}"
        if len(words) > 2 or _OWNER.fullmatch(owner) is None:
            wrong.append(number)
        else:
            owners[digest] = owner
    return owners, wrong


class KeyRing:
    """The keys of a file, read again when the file changes, from `start` to `stop`."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Reads the file.

        Raises:
            OSError: the file cannot be read.
            ValueError: a line is not a key and a name.
        """
        self._path = path
        self._clock = clock
        self._stamp = self._file_stamp()
        self._owners, wrong = parse_keys(path.read_text())
        self._read_at = clock()
        self._looks = Periodic("watch of the API keys", _LOOK_S, lambda: READS.run(self.look), _DEADLINE_S)
        if wrong:
            raise ValueError(f"{path}: line {wrong[0]}: expected a key and optionally a space and a name")
        if not self._owners:
            log.warning("%s holds no key: every request will be refused", path)

    async def start(self) -> None:
        self._looks.start()

    async def stop(self) -> None:
        await self._looks.stop()

    def owner_of(self, key: str | None) -> str:
        """Name of the key's owner.

        Raises:
            Unauthenticated: no key, or none of this cluster's.
        """
        if not key:
            raise Unauthenticated(
                "no API key: set TINKER_API_KEY (HTTP header X-API-Key, gRPC metadata x-api-key)"
            )
        owner = self._owners.get(_digest(key))
        if owner is None:
            raise Unauthenticated("the API key is not one of this cluster's: ask its operator for a key")
        return owner

    def look(self) -> None:
        """Reads the file again if it changed.

        Raises:
            OSError: it cannot be read. The keys read before are let in for a minute more.
        """
        try:
            stamp = self._file_stamp()
            if stamp != self._stamp:
                self._take(self._path.read_text())
                self._stamp = stamp
        except OSError:
            if self._clock() - self._read_at >= _UNREADABLE_S:
                self._owners = {}
                self._stamp = (0, 0, 0)
            raise
        self._read_at = self._clock()

    def _take(self, text: str) -> None:
        self._owners, wrong = parse_keys(text)
        log.info("read %d API keys from %s", len(self._owners), self._path)
        if wrong:
            log.error("%s: lines %s are not a key and a name, and let nobody in", self._path, wrong)

    def _file_stamp(self) -> tuple[int, int, int]:
        status = self._path.stat()
        return (status.st_mtime_ns, status.st_size, status.st_ino)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
