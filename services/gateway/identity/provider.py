"""Tokens of an identity provider of one's own, in the place of API keys (OpenID Connect, RFC 7519).

Invariants: a token counts when a key that the provider publishes at present signed it, by an asymmetric
algorithm, for this cluster's audience, and its time is not over; whatever is missing or unknown lets nobody
in. The keys are fetched beside the calls, never by one, and are few. While they cannot be fetched those that
are known count for an hour; then nobody can tell, and calls are refused so that clients come again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import jwt

from services.common.contract.errors import InvalidRequest, Unauthenticated, Unavailable
from services.common.process.periodic import Periodic
from services.common.process.pools import Pool
from services.gateway.identity import owner
from services.gateway.identity.key import ADMIN, READ, USER, Caller

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
KEY_ID = "provider:"
"""What the key id of such a caller begins with; the owner follows."""

_LOOK_S = 5.0
_FRESH_S = 300.0
_COOL_S = 30.0
_AWAY_S = 3600.0
_FETCH_S = 10.0
_DEADLINE_S = 15.0
_MOST_KEYS = 100
_LEEWAY_S = 30
_BY_RANK = (ADMIN, USER, READ)


@dataclass(frozen=True)
class ProviderSettings:
    """Whose tokens are believed, and what is read in them.

    Attributes:
        issuer: claim `iss`; empty: there is no provider.
        audience: one of claim `aud`.
        jwks_url: where the provider publishes its keys.
        owner_claim: whose value is the owner.
        role_claim: whose value is the role, or a list that has it; empty: all have role user.
    """

    issuer: str = ""
    audience: str = ""
    jwks_url: str = ""
    owner_claim: str = "sub"
    role_claim: str = ""

    def check(self) -> None:
        """Raises InvalidRequest: something is missing, or cannot be."""
        given = [self.issuer, self.audience, self.jwks_url]
        if any(given) and not all(given):
            raise InvalidRequest(
                "--oidc-issuer, --oidc-audience and --oidc-jwks-url go together: set all three"
            )
        where = urlsplit(self.jwks_url)
        if where.scheme == "http" and where.hostname not in ("localhost", "127.0.0.1", "::1"):
            raise InvalidRequest(
                "--oidc-jwks-url must be https: whoever answers in its place lets anybody in"
            )
        if self.issuer and not self.owner_claim:
            raise InvalidRequest("--oidc-owner-claim names the claim with the owner, such as sub or email")


def provider(settings: ProviderSettings) -> Provider | None:
    """The provider that is set; None: there is none."""
    return Provider(settings) if settings.issuer else None


class Provider:
    """The provider's keys, fetched from `start` to `stop`, and the tokens that they sign."""

    def __init__(self, settings: ProviderSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._client = jwt.PyJWKClient(settings.jwks_url, cache_jwk_set=False, timeout=_FETCH_S)
        self._keys: dict[str, jwt.PyJWK] = {}
        self._fetched_at: float | None = None
        self._tried_at = 0.0
        self._wanted = True
        # Its own: a provider that hangs holds up nobody else's reads.
        self._thread = Pool("fetch of the provider's keys", 1, _DEADLINE_S)
        self._looks = Periodic("keys of the identity provider", _LOOK_S, self.look, 2 * _DEADLINE_S)

    async def start(self) -> None:
        self._looks.start()

    async def stop(self) -> None:
        await self._looks.stop()

    async def look(self) -> None:
        """Fetches the keys if they are old, or one was met that is not among them.

        Raises:
            Unavailable: they cannot be fetched.
        """
        age = self._age
        if age < (_COOL_S if self._wanted else _FRESH_S):
            return
        if self._fetched_at is not None and self._clock() - self._tried_at < _COOL_S:
            return
        self._tried_at = self._clock()
        try:
            found = await self._thread.run(self._client.get_signing_keys, True)
        except jwt.PyJWTError as error:
            raise Unavailable(f"{self._settings.jwks_url}: {error}") from error
        if len(found) > _MOST_KEYS:
            raise Unavailable(
                f"{self._settings.jwks_url} has {len(found)} keys; at most {_MOST_KEYS} are taken"
            )
        self._keys = {str(key.key_id): key for key in found}
        self._fetched_at, self._wanted = self._clock(), False

    def caller_of(self, token: str) -> Caller:
        """Who has the token.

        Raises:
            Unauthenticated: it does not count.
            Unavailable: the provider's keys are not known.
        """
        claims = self._claims(token, self._key_of(token))
        role, found = self._role(claims), self._owner(claims)
        return Caller(found, role, (), f"{KEY_ID}{found}", float(claims["exp"]))

    @property
    def _age(self) -> float:
        return float("inf") if self._fetched_at is None else self._clock() - self._fetched_at

    def _key_of(self, token: str) -> jwt.PyJWK:
        try:
            header = jwt.get_unverified_header(token)
        except jwt.PyJWTError as error:
            raise Unauthenticated(f"the token cannot be read: {error}") from error
        if header.get("alg") not in ALGORITHMS:
            raise Unauthenticated(f"the token is not signed by one of {', '.join(ALGORITHMS)}")
        if self._age > _AWAY_S:
            raise Unavailable("the keys of the identity provider cannot be fetched at present; try again")
        key = self._keys.get(str(header.get("kid")))
        if key is not None:
            return key
        # It may be a new one. Who makes keys up has them fetched no more often than that.
        self._wanted = True
        if self._age > _COOL_S:
            raise Unavailable("the token is signed with a key that is not known yet; try again")
        raise Unauthenticated("the token is signed with a key that the identity provider does not publish")

    def _claims(self, token: str, key: jwt.PyJWK) -> dict[str, Any]:
        settings = self._settings
        try:
            return jwt.decode(
                token,
                key,
                list(ALGORITHMS),
                audience=settings.audience,
                issuer=settings.issuer,
                leeway=_LEEWAY_S,
                options={"require": ["exp", "iss", "aud"]},
            )
        except jwt.PyJWTError as error:
            raise Unauthenticated(f"the token does not count: {error}") from error

    def _owner(self, claims: dict[str, Any]) -> str:
        found = claims.get(self._settings.owner_claim)
        if not isinstance(found, str):
            raise Unauthenticated(f"the token has no {self._settings.owner_claim}, which names its owner")
        try:
            return owner.of_subject(found)
        except InvalidRequest as error:
            raise Unauthenticated(f"the token's {self._settings.owner_claim}: {error.message}") from error

    def _role(self, claims: dict[str, Any]) -> str:
        if not self._settings.role_claim:
            return USER
        found = claims.get(self._settings.role_claim)
        held = found if isinstance(found, list) else [found]
        for role in _BY_RANK:
            if role in held:
                return role
        raise Unauthenticated(f"the token's {self._settings.role_claim} has none of {', '.join(_BY_RANK)}")
