"""The file of API keys: one that is mounted, or that `tinsmith up` made.

Invariant: a line that cannot be read lets nobody in, whatever the others say.

A line is

    KEY OWNER [role=ROLE] [scopes=SCOPE,SCOPE] [expires=2027-01-31]

where KEY is the key itself, or what `tinsmith keys create --for-file` prints in its place, from which nobody
can tell the key. Blank lines and lines that begin with "#" are skipped.
"""

from __future__ import annotations

import datetime
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256

from services.common.contract.errors import InvalidRequest
from services.gateway.identity.key import PREFIX, KeyRecord, Rights, digest, id_in

_HASHED = re.compile(r"hash:([0-9a-z]{12}):([0-9a-f]{32}):([0-9a-f]{64})")
_SALT = secrets.token_bytes(32)
"""Of keys that stand in the file as they are: this process's own, so that nobody can foresee a digest."""


@dataclass(frozen=True)
class FileKeys:
    """What a file says.

    Attributes:
        wrong: numbers of the lines that cannot be read, and why.
        count: keys that let somebody in.
    """

    _plain: Mapping[bytes, KeyRecord]
    _hashed: Mapping[str, KeyRecord]
    wrong: Sequence[tuple[int, str]]

    @property
    def count(self) -> int:
        return len(self._plain) + len(self._hashed)

    @property
    def records(self) -> list[KeyRecord]:
        return [*self._plain.values(), *self._hashed.values()]

    def of_id(self, key_id: str) -> list[KeyRecord]:
        """The records of the keys with an id: each call with a token looks for one."""
        return self._by_id.get(key_id, [])

    @cached_property
    def _by_id(self) -> dict[str, list[KeyRecord]]:
        found: dict[str, list[KeyRecord]] = {}
        for record in self.records:
            found.setdefault(record.id, []).append(record)
        return found

    def find(self, key: str) -> KeyRecord | None:
        """The record of a key."""
        plain = self._plain.get(digest(_SALT, key))
        if plain is not None:
            return plain
        record = self._hashed.get(id_in(key) or "")
        return record if record is not None and record.is_of(key) else None


def parse(text: str) -> FileKeys:
    """What the text of a file says."""
    plain: dict[bytes, KeyRecord] = {}
    hashed: dict[str, KeyRecord] = {}
    wrong: list[tuple[int, str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            key, rights = words[0], _rights(words[1:])
            as_hash = _HASHED.fullmatch(key)
            if as_hash:
                hashed[as_hash[1]] = _record(as_hash[1], rights, as_hash[2], as_hash[3])
            elif key.startswith(PREFIX):
                plain[digest(_SALT, key)] = _record(id_in(key) or _id_of(key, rights.owner), rights)
            else:
                raise InvalidRequest(f"a key begins with {PREFIX}")
        except InvalidRequest as error:
            wrong.append((number, error.message))
    return FileKeys(plain, hashed, wrong)


def line_of(record: KeyRecord) -> str:
    """The line of a record that lets its key in."""
    words = [f"hash:{record.id}:{record.salt}:{record.digest}", record.owner, f"role={record.role}"]
    if record.scopes:
        words.append(f"scopes={','.join(record.scopes)}")
    if record.expires_at is not None:
        until = datetime.datetime.fromtimestamp(record.expires_at, datetime.UTC)
        words.append(f"expires={until.strftime('%Y-%m-%dT%H:%M:%SZ')}")
    return " ".join(words)


def _id_of(key: str, owner: str) -> str:
    """The id of a key that has none in it: its own, and the same on every gateway, so that what was given for
    it ends with it. Eight digits of a hash tell nothing of a key that cannot be guessed."""
    return f"file:{owner}:{sha256(key.encode()).hexdigest()[:8]}"


def _record(key_id: str, rights: Rights, salt: str = "", hashed: str = "") -> KeyRecord:
    return KeyRecord(
        id=key_id,
        owner=rights.owner,
        role=rights.role,
        scopes=rights.scopes,
        expires_at=rights.expires_at,
        salt=salt,
        digest=hashed,
    )


def _rights(words: Sequence[str]) -> Rights:
    if not words:
        raise InvalidRequest("the owner's name is missing after the key")
    given: dict[str, str] = {}
    for word in words[1:]:
        name, equals, value = word.partition("=")
        if not equals or name not in ("role", "scopes", "expires") or name in given:
            raise InvalidRequest("after the owner come role=, scopes= and expires=, each once")
        given[name] = value
    scopes = tuple(sorted(set(given["scopes"].split(",")))) if "scopes" in given else ()
    rights = Rights(words[0], given.get("role", "user"), scopes, _until(given.get("expires")))
    rights.check()
    return rights


def _until(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        found = datetime.datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidRequest("expires is a date such as 2027-01-31 or 2027-01-31T12:00:00Z") from error
    return (found if found.tzinfo else found.replace(tzinfo=datetime.UTC)).timestamp()
