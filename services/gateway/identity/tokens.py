"""Short-lived tokens that stand for an API key, as the tinker SDK asks for them (`auth/token`).

Invariants: a token is signed with a secret that the gateways share, and ends with its time, its key, and any
change of what that key may do. It gives nothing that its key does not. Whoever has the secret is a gateway,
or Redis: so one algorithm with one secret does, and a token that names another algorithm is none of these.
"""

from __future__ import annotations

import time
from functools import lru_cache
from typing import Any

import jwt

from services.common.contract.errors import Unauthenticated
from services.gateway.identity.key import Caller

LIFE_S = 900
REJECTED = "invalid_token"
"""Code of what a client mends by asking for another token."""

_PREFIX = "eyJ"
_ALGORITHM = "HS256"
_ISSUER = "tinsmith"
_ORGANIZATION = "tinsmith"
_HEAD = jwt.encode({}, "0" * 32, _ALGORITHM).partition(".")[0] + "."
"""What every token begins with that a gateway makes."""
_REMEMBERED = 1024
"""Tokens whose signature was checked. A client sends the same one with every call."""


def is_token(key: str) -> bool:
    """Whether what came in an API key's place is a token, of whomever."""
    return key.startswith(_PREFIX)


def is_own(token: str) -> bool:
    """Whether a token says that a gateway signed it.

    Raises:
        Unauthenticated: it is no token.
    """
    if token.startswith(_HEAD):
        return True
    try:
        return jwt.get_unverified_header(token).get("alg") == _ALGORITHM
    except jwt.PyJWTError as error:
        raise Unauthenticated(f"the token cannot be read: {error}", REJECTED) from error


def is_over(until: float) -> bool:
    """Whether what lasts until then, in seconds since 1970, has ended."""
    return until <= time.time()


def mint(secret: str, caller: Caller, now: float) -> str:
    """A token for a caller. It lasts no longer than what the caller came with."""
    until = min(now + LIFE_S, caller.until or float("inf"))
    claims = {
        "iss": _ISSUER,
        "iat": int(now),
        "exp": int(until),
        # As `whoami` of the SDK reads them.
        "sub": f"tinsmith:user:{caller.owner}",
        "org_id": _ORGANIZATION,
        "email": caller.owner,
        "owner": caller.owner,
        "role": caller.role,
        "scopes": list(caller.scopes),
        "key": caller.key_id,
    }
    return jwt.encode(claims, secret, _ALGORITHM)


def read(secret: str, token: str) -> Caller:
    """Whom a token was made for. Whether that one's key still stands is for the caller to find out.

    Raises:
        Unauthenticated: it was not made here, or its time is over.
    """
    try:
        found = _signed(secret, token)
    except jwt.PyJWTError as error:
        raise Unauthenticated("the token is not one of this cluster's", REJECTED) from error
    if is_over(found["exp"]):
        raise Unauthenticated("the token has expired; exchange the API key for another one", REJECTED)
    return Caller(found["owner"], found["role"], tuple(found["scopes"]), found["key"], float(found["exp"]))


@lru_cache(_REMEMBERED)
def _signed(secret: str, token: str) -> dict[str, Any]:
    """What a token says, however old it is. What raises is not remembered, so nobody's junk takes the place
    of what was signed here.

    Raises:
        jwt.PyJWTError: it was not made here.
    """
    return jwt.decode(
        token,
        secret,
        [_ALGORITHM],
        issuer=_ISSUER,
        options={"require": ["exp", "key"], "verify_iat": False, "verify_exp": False},
    )
