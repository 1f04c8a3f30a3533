"""The keys that a gateway lets in: those of its file and those in Redis; and tokens, in the place of keys.

Invariants: a key that was revoked, or taken out of the file, is let in no more after two seconds, whatever is
wrong with the others: the file's state and the version of Redis' keys are looked at twice a second. While the
file cannot be read, is being written or was emptied, or Redis does not answer, nobody new is let in; those
that were known are for a while, and then nobody is. A key is only called wrong by who knows all keys.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from redis.exceptions import RedisError

from services.common.contract.errors import Unauthenticated, Unavailable
from services.common.process.periodic import Periodic
from services.common.process.pools import Pool
from services.gateway.identity import keys_file, tokens
from services.gateway.identity.key import Caller, KeyRecord, id_in
from services.gateway.identity.key_store import KeyStore
from services.gateway.identity.keys_file import FileKeys
from services.gateway.identity.provider import KEY_ID, Provider

log = logging.getLogger(__name__)

_LOOK_S = 0.5
_SETTLED_S = 0.3
"""A file that changed is read when nobody wrote to it for so long: editors may empty it first, then write."""
_DEADLINE_S = 10.0
_FIRST_LOOK_S = 5.0
_FILE_AWAY_S = 60.0
_REDIS_AWAY_S = 30.0
"""For so long known keys are known without Redis. Nearly nothing can be done then, and nothing revoked."""
_USED_S = 60.0
_REMEMBERED = 1024
"""Tokens of which it is remembered whom they stand for. A client sends the same one with every call."""
_MOST_CHARS = 4096
"""Of a key or token. Reading one takes time by its length, before anybody knows whose it is."""


class _Remembered(NamedTuple):
    """Whom a token stands for, until when if no key changes, and by which keys of the file."""

    caller: Caller
    until: float
    file: FileKeys


class KeyRing:
    """The keys, looked at from `start` to `stop`."""

    def __init__(
        self,
        path: Path,
        store: KeyStore,
        clock: Callable[[], float] = time.monotonic,
        provider: Provider | None = None,
    ) -> None:
        """Reads the file.

        Args:
            provider: whose tokens are let in, too; None: nobody's.

        Raises:
            OSError: the file cannot be read.
            ValueError: a line is not one of a key.
        """
        self._path = path
        self._store = store
        self._clock = clock
        self._stamp = self._file_stamp()
        text = path.read_text()
        self._file = keys_file.parse(text)
        self._empty = not text.strip()
        self._file_at = clock()
        self._told_away = False
        self._records: dict[str, KeyRecord] = {}
        self._version: str | None = None
        self._provider = provider
        self._token_secret = ""
        # By their tokens, as long as no key in Redis and no secret changes.
        self._callers: dict[str, _Remembered] = {}
        self._redis_at: float | None = None
        self._used: set[str] = set()
        self._used_at = clock()
        # Its own: reads of a store that hangs have all of the others.
        thread = Pool("look at the file of API keys", 1, None)
        self._file_looks = Periodic(
            "watch of the file of API keys", _LOOK_S, lambda: thread.run(self.look_at_file), _DEADLINE_S
        )
        self._redis_looks = Periodic("watch of the API keys in Redis", _LOOK_S, self.look, _DEADLINE_S)
        if self._file.wrong:
            number, why = self._file.wrong[0]
            raise ValueError(f"{path}: line {number}: {why}")
        if not self._file.count:
            log.warning("%s holds no key: only those that `tinsmith keys create` made are let in", path)

    async def start(self) -> None:
        """Keeps looking. Where Redis answers at once, its keys and the tokens are known from now on."""
        with suppress(RedisError, TimeoutError):
            async with asyncio.timeout(_FIRST_LOOK_S):
                await self.look()
        self._file_looks.start()
        self._redis_looks.start()
        if self._provider is not None:
            await self._provider.start()

    async def stop(self) -> None:
        if self._provider is not None:
            await self._provider.stop()
        await self._file_looks.stop()
        await self._redis_looks.stop()

    @property
    def trouble(self) -> int:
        """Lines of the file that let nobody in, or 1 while it cannot be read."""
        return len(self._file.wrong) or int(self._file_looks.failures_in_a_row > 0)

    @property
    def of_file(self) -> list[KeyRecord]:
        """What the file says, for those who list keys."""
        return self._file.records

    def caller_of(self, key: str | None) -> Caller:
        """Who has the key, or the token in its place.

        Raises:
            Unauthenticated: no key, none of this cluster's, or one that has ended.
            Unavailable: it may be one in Redis, which has not answered for long, in the file, which was not
                looked at for long, or of the provider, whose keys are not known.
        """
        if not key:
            raise Unauthenticated(
                "no API key: set TINKER_API_KEY (HTTP header X-API-Key, gRPC metadata x-api-key)"
            )
        if len(key) > _MOST_CHARS:
            raise Unauthenticated(f"the API key has {len(key)} characters; no key or token has {_MOST_CHARS}")
        if tokens.is_token(key):
            return self._of_token(key)
        record = self._of_file(key) or self._stored(key)
        if record is None:
            self._check_file_is_known()
            if " " in key:
                raise Unauthenticated(
                    "the API key has a space in it: of a line in a file of keys the key is the first word"
                )
            raise Unauthenticated("the API key is not one of this cluster's: ask its operator for a key")
        if _ended(record):
            raise Unauthenticated("the API key has expired: ask the operator of this cluster for a new one")
        return Caller(record.owner, record.role, record.scopes, record.id, record.expires_at)

    def token_for(self, caller: Caller) -> str:
        """A token that stands for what a caller came with, for a while.

        Raises:
            Unauthenticated: that has ended by now.
            Unavailable: none can be made at present.
        """
        if caller.until is not None and caller.until <= time.time():
            raise Unauthenticated("what was sent in the API key's place has expired", tokens.REJECTED)
        return tokens.mint(self._known_secret(), caller, time.time())

    def knows(self, key: str | None) -> bool:
        """Whether the key lets anybody in at present."""
        try:
            self.caller_of(key)
        except (Unauthenticated, Unavailable):
            return False
        return True

    def owner_of(self, key: str | None) -> str:
        """Name of the key's owner. Raises as `caller_of`."""
        return self.caller_of(key).owner

    def owner_by_id(self, key_id: str) -> str | None:
        """Owner of a key that is let in at present, or of the provider's tokens; None: there is none of this
        id.

        Raises:
            Unavailable: nobody can tell at present.
        """
        if self._provider is not None and key_id.startswith(KEY_ID):
            return key_id.removeprefix(KEY_ID)
        return next((record.owner for record in self._standing(key_id)), None)

    def _standing(self, key_id: str) -> list[KeyRecord]:
        """The keys of an id that have not ended."""
        found = self._file.of_id(key_id) if self._file_is_known() else []
        if not found:
            self._check_redis_is_known()
            found = [self._records[key_id]] if key_id in self._records else []
        if not found:
            self._check_file_is_known()
        return [record for record in found if not _ended(record)]

    def _of_token(self, token: str) -> Caller:
        if tokens.is_own(token):
            return self._of_own_token(token)
        if self._provider is None:
            raise Unauthenticated("this cluster takes no tokens of an identity provider; use an API key")
        return self._provider.caller_of(token)

    def _of_own_token(self, token: str) -> Caller:
        # Another thread reads the file: what was looked up in one is of no other.
        file, known = self._file, self._callers.get(token)
        if (
            known is None
            or known.file is not file
            or tokens.is_over(known.until)
            or not self._file_is_known()
        ):
            known = _Remembered(*self._looked_up(token), file)
            if len(self._callers) >= _REMEMBERED:
                self._callers.clear()
            if self._file_is_known():
                self._callers[token] = known
        caller = known.caller
        self._check_redis_is_known()
        if caller.key_id in self._records:
            self._used.add(caller.key_id)
        return caller

    def _looked_up(self, token: str) -> tuple[Caller, float]:
        """Whom a token of this cluster stands for, and until when if no key changes."""
        caller = tokens.read(self._known_secret(), token)
        until = caller.until or 0.0
        if caller.key_id.startswith(KEY_ID):
            stands = self._provider is not None
        else:
            may = [
                record.expires_at or until
                for record in self._standing(caller.key_id)
                if (record.owner, record.role, record.scopes) == (caller.owner, caller.role, caller.scopes)
            ]
            stands, until = bool(may), min(until, max(may, default=until))
        if not stands:
            raise Unauthenticated("what the token stands for has ended, or changed", tokens.REJECTED)
        return caller, until

    def _known_secret(self) -> str:
        self._check_redis_is_known()
        if not self._token_secret:
            raise Unavailable(
                "Redis has no memory left for the secret of tokens; try again, or use an API key"
            )
        return self._token_secret

    def _of_file(self, key: str) -> KeyRecord | None:
        return self._file.find(key) if self._file_is_known() else None

    def _file_is_known(self) -> bool:
        # Also a read that hangs makes what was read too old.
        return self._clock() - self._file_at <= _FILE_AWAY_S

    def _check_file_is_known(self) -> None:
        if not self._file_is_known():
            raise Unavailable("the file of API keys cannot be read at present; try again")

    def _stored(self, key: str) -> KeyRecord | None:
        key_id = id_in(key)
        if key_id is None:
            return None
        self._check_redis_is_known()
        record = self._records.get(key_id)
        if record is None or not record.is_of(key):
            return None
        self._used.add(key_id)
        return record

    def _check_redis_is_known(self) -> None:
        if self._redis_at is None or self._clock() - self._redis_at > _REDIS_AWAY_S:
            raise Unavailable("the API keys in Redis cannot be read at present; try again")

    async def look(self) -> None:
        """Reads the keys in Redis again if one changed, and notes now and then which were used."""
        asked = self._clock()
        version, secret = await self._store.version(), await self._store.token_secret()
        if (version, secret) != (self._version, self._token_secret):
            self._token_secret = secret
            self._callers.clear()
        if version != self._version:
            # A change that comes between the two is seen by the next look.
            self._records = {record.id: record for record in await self._store.all()}
            self._callers.clear()
            self._version = version
            log.info("read %d API keys from Redis", len(self._records))
        self._redis_at = asked
        if self._used and asked - self._used_at >= _USED_S:
            used, self._used, self._used_at = self._used & self._records.keys(), set(), asked
            await self._store.note_used(used, time.time())

    def look_at_file(self) -> None:
        """Reads the file again if it changed. Blocking.

        Raises:
            OSError: it cannot be read, is being written, or is empty and was not before. The keys read before
                are let in for a minute more.
        """
        asked = self._clock()
        try:
            stamp = self._file_stamp()
            if stamp != self._stamp:
                self._take(self._settled_text(stamp))
                self._stamp = stamp
        except (OSError, UnicodeDecodeError) as error:
            if not self._told_away and self._clock() - self._file_at > _FILE_AWAY_S:
                self._told_away = True
                log.error("%s cannot be read: its keys let nobody in until it can", self._path)
            raise OSError(f"{self._path} cannot be read: {error}") from error
        self._file_at, self._told_away = asked, False

    def _settled_text(self, stamp: tuple[int, int, int]) -> str:
        """What the file holds, whole, if it has this state now and keeps it.

        Raises:
            OSError: it does not, or it became empty, which whoever writes it may have been stopped at.
        """
        # Before the file is read: what is written after that has another time, however coarse times are.
        time.sleep(_SETTLED_S)
        text = self._path.read_text()
        if self._file_stamp() != stamp:
            raise OSError("it is being written")
        if not self._empty and not text.strip():
            raise OSError("it became empty; a line that begins with # says that no key is to be in it")
        return text

    def _take(self, text: str) -> None:
        self._file = found = keys_file.parse(text)
        self._empty = not text.strip()
        log.info("read %d API keys from %s", found.count, self._path)
        for number, why in found.wrong:
            log.error("%s: line %d lets nobody in: %s", self._path, number, why)

    def _file_stamp(self) -> tuple[int, int, int]:
        status = self._path.stat()
        return (status.st_mtime_ns, status.st_size, status.st_ino)


def _ended(record: KeyRecord) -> bool:
    return record.expires_at is not None and time.time() >= record.expires_at
