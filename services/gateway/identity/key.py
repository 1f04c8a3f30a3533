"""An API key: what is kept of it, and what its caller is then known by.

Invariant: of a key that this cluster made only a salted hash is kept, so that nothing that is stored lets
anybody in. A secret is 256 random bits, which nobody guesses however fast the hash is: a slow one, which
passwords need, would cost every call milliseconds and gain nothing. The salt is a key's own, so that records
of two clusters cannot be compared.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from services.common.contract.errors import InvalidRequest
from services.gateway.identity import owner

PREFIX = "tml-"
"""The SDK takes keys that begin so."""

ADMIN, USER, READ = "admin", "user", "read"
ROLES = (ADMIN, USER, READ)
"""What a key may do: everything and the administration; everything with its owner's objects; look at them."""

TRAIN, SAMPLE, CHECKPOINTS = "train", "sample", "checkpoints"
SCOPES = (TRAIN, SAMPLE, CHECKPOINTS)
"""What a key may be limited to."""

_MINTED = re.compile(r"tml-([0-9a-z]{12})-[0-9A-Za-z_-]{43}")
_ID_LETTERS = "0123456789abcdefghjkmnpqrstvwxyz"
_MOST_NOTE = 200


@dataclass(frozen=True)
class Rights:
    """Whose a key is and what it may do.

    Attributes:
        owner: of what is made with it. It stays when the key is rotated.
        role: one of ROLES.
        scopes: what it is limited to, of SCOPES; none: it is not limited, as role admin never is.
        expires_at: when it ends, in seconds since 1970; None: never by itself.
        note: what it is for.
    """

    owner: str
    role: str = USER
    scopes: tuple[str, ...] = ()
    expires_at: float | None = None
    note: str = ""

    def check(self) -> None:
        """Raises InvalidRequest, with the first thing that is wrong."""
        owner.check(self.owner)
        if self.role not in ROLES:
            raise InvalidRequest(f"role is one of {', '.join(ROLES)}, not {self.role[:40]!r}", field="role")
        for scope in self.scopes:
            if scope not in SCOPES:
                known = ", ".join(SCOPES)
                raise InvalidRequest(f"scopes are of {known}, not {scope[:40]!r}", field="scopes")
        if self.role == ADMIN and self.scopes:
            raise InvalidRequest(
                "a key of role admin cannot be limited to scopes: it could make itself another one; leave "
                "the scopes out, or take role user",
                field="scopes",
            )
        if len(self.note) > _MOST_NOTE or not self.note.isprintable():
            raise InvalidRequest(f"note is one line of at most {_MOST_NOTE} characters", field="note")


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is kept of a key.

    Attributes:
        id: its name in logs and commands, no secret.
        salt: hex.
        digest: hex of HMAC-SHA256(salt, key).
        created_at: in seconds since 1970.
        Others as in Rights.
    """

    id: str
    owner: str
    role: str = USER
    scopes: tuple[str, ...] = ()
    expires_at: float | None = None
    note: str = ""
    salt: str = ""
    digest: str = ""
    created_at: float = 0.0

    @property
    def rights(self) -> Rights:
        return Rights(self.owner, self.role, self.scopes, self.expires_at, self.note)

    def is_of(self, key: str) -> bool:
        """Whether the record is this key's; takes as long whatever the key is."""
        found = digest(bytes.fromhex(self.salt), key)
        return bool(self.digest) and hmac.compare_digest(found, bytes.fromhex(self.digest))


@dataclass(frozen=True)
class Caller:
    """Who makes a call.

    Attributes:
        key_id: of the key that it came with.
        until: when what it came with ends, in seconds since 1970; None: not by itself.
    """

    owner: str
    role: str = USER
    scopes: tuple[str, ...] = ()
    key_id: str = ""
    until: float | None = None


def mint(rights: Rights, now: float) -> tuple[KeyRecord, str]:
    """A new key: what is kept of it, and the key itself, which is not. Raises InvalidRequest."""
    rights.check()
    key_id = "".join(secrets.choice(_ID_LETTERS) for _ in range(12))
    key = f"{PREFIX}{key_id}-{secrets.token_urlsafe(32)}"
    salt = secrets.token_bytes(16)
    record = KeyRecord(
        id=key_id,
        owner=rights.owner,
        role=rights.role,
        scopes=tuple(sorted(set(rights.scopes))),
        expires_at=rights.expires_at,
        note=rights.note,
        salt=salt.hex(),
        digest=digest(salt, key).hex(),
        created_at=now,
    )
    return record, key


def digest(salt: bytes, key: str) -> bytes:
    """HMAC-SHA256 of a key."""
    return hmac.digest(salt, key.encode(errors="replace"), "sha256")


def id_in(key: str) -> str | None:
    """The id in a key that a cluster made."""
    found = _MINTED.fullmatch(key)
    return found[1] if found else None


_SHOWN = 7
"""One more, after the prefix, and the log takes it for a key and hides it (`telemetry/logs.py`)."""


def shown(key: str | None) -> str:
    """What of a key may stand in a log: its id, or its first characters."""
    if not key:
        return "no key"
    return f"key {id_in(key)}" if id_in(key) else f"key {key[: min(_SHOWN, len(key) // 2)]!r}..."


def described(scopes: Sequence[str]) -> str:
    """Scopes in words."""
    return ", ".join(scopes) or "everything"
