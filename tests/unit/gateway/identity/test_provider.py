"""Tokens of an identity provider: a real one's keys, fetched over HTTP, and real tokens."""

from __future__ import annotations

import hmac
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.utils import base64url_encode

from services.common.contract.errors import InvalidRequest, TinsmithError, Unauthenticated, Unavailable
from services.gateway.identity.key import Caller
from services.gateway.identity.provider import Provider, ProviderSettings

ISSUER, AUDIENCE = "https://login.example.com/", "tinsmith"


@dataclass
class Idp:
    """A provider that publishes the keys in `keys`, by id."""

    url: str
    keys: dict[str, ec.EllipticCurvePrivateKey]
    asked: int = 0
    away: bool = False

    def token(self, kid: str = "one", algorithm: str = "ES256", key: Any = None, **claims: Any) -> str:
        """A token for alice, with other claims where they are given; None: without that claim."""
        whole = {"iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "exp": time.time() + 600, **claims}
        told = {name: value for name, value in whole.items() if value is not None}
        return jwt.encode(told, key or self.keys[kid], algorithm, headers={"kid": kid})

    def jwks(self) -> dict[str, Any]:
        found = []
        for kid, key in self.keys.items():
            public = jwt.algorithms.ECAlgorithm.to_jwk(key.public_key(), as_dict=True)
            found.append({**public, "kid": kid, "use": "sig", "alg": "ES256"})
        return {"keys": found}


@pytest.fixture
def idp() -> Iterator[Idp]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            made.asked += 1
            self.send_response(503 if made.away else 200)
            self.end_headers()
            self.wfile.write(json.dumps(made.jwks()).encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made = Idp(
        f"http://127.0.0.1:{server.server_port}/keys", {"one": ec.generate_private_key(ec.SECP256R1())}
    )
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    serving.start()
    yield made
    server.shutdown()
    serving.join()
    server.server_close()


@pytest.fixture
def now() -> list[float]:
    return [1000.0]


@pytest.fixture
def settings(idp: Idp) -> ProviderSettings:
    return ProviderSettings(ISSUER, AUDIENCE, idp.url)


@pytest.fixture
async def provider(settings: ProviderSettings, now: list[float]) -> Provider:
    made = Provider(settings, clock=lambda: now[0])
    await made.look()
    return made


async def test_a_token_of_the_provider_is_its_owners(provider: Provider, idp: Idp) -> None:
    until = float(int(time.time()) + 600)
    expected = Caller("oidc~alice", "user", (), "provider:oidc~alice", until)
    assert provider.caller_of(idp.token(exp=until)) == expected
    assert provider.caller_of(idp.token(exp=until, aud=["else", AUDIENCE])) == expected


def without_signature(idp: Idp) -> str:
    return jwt.encode(
        jwt.decode(idp.token(), options={"verify_signature": False}), None, "none", {"kid": "one"}
    )


def signed_with_the_public_key(idp: Idp, algorithm: str = "HS256") -> str:
    """The library makes no such token, so it is put together here."""
    public = (
        idp.keys["one"]
        .public_key()
        .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    head = base64url_encode(json.dumps({"alg": algorithm, "kid": "one"}).encode())
    signed = head + b"." + idp.token().split(".")[1].encode()
    return (signed + b"." + base64url_encode(hmac.digest(public, signed, "sha256"))).decode()


REFUSED: dict[str, Callable[[Idp], str]] = {
    "expired": lambda idp: idp.token(exp=time.time() - 60),
    "not yet": lambda idp: idp.token(nbf=time.time() + 600),
    "for ever": lambda idp: idp.token(exp=None),
    "another audience": lambda idp: idp.token(aud="else"),
    "no audience": lambda idp: idp.token(aud=None),
    "another issuer": lambda idp: idp.token(iss="https://login.example.com.evil/"),
    "no issuer": lambda idp: idp.token(iss=None),
    "another key": lambda idp: idp.token(key=ec.generate_private_key(ec.SECP256R1())),
    "an unknown key": lambda idp: idp.token(kid="two", key=ec.generate_private_key(ec.SECP256R1())),
    "no signature": without_signature,
    "the public key as a secret": signed_with_the_public_key,
    "no owner": lambda idp: idp.token(sub=None),
    "an owner without a name": lambda idp: idp.token(sub=""),
    "an owner of another kind": lambda idp: idp.token(sub=None, owner=7),
    "the public key as a secret, under another name": lambda idp: signed_with_the_public_key(idp, "ES256"),
    "changed": lambda idp: idp.token().replace(".", ".x", 1),
    "no token": lambda idp: "eyJ",
}


@pytest.mark.parametrize("what", REFUSED)
async def test_a_token_that_is_not_whole_lets_nobody_in(provider: Provider, idp: Idp, what: str) -> None:
    with pytest.raises(Unauthenticated):
        provider.caller_of(REFUSED[what](idp))
    assert provider.caller_of(idp.token()).owner == "oidc~alice"


@pytest.mark.parametrize(
    ("roles", "role"),
    [("admin", "admin"), (["x", "read"], "read"), (["read", "user"], "user"), ("x", None), (None, None)],
)
async def test_owner_and_role_are_read_from_the_claims_that_are_named(
    settings: ProviderSettings, idp: Idp, roles: Any, role: str | None
) -> None:
    provider = Provider(replace(settings, owner_claim="email", role_claim="tinsmith"))
    await provider.look()
    token = idp.token(email="bob@example.com", tinsmith=roles)
    if role is None:
        with pytest.raises(Unauthenticated, match="none of admin, user, read"):
            provider.caller_of(token)
    else:
        caller = provider.caller_of(token)
        assert (caller.owner, caller.role) == ("oidc~bob@example.com", role)


async def test_keys_are_fetched_anew_when_a_new_one_is_met_and_not_for_every_one_that_is_made_up(
    provider: Provider, idp: Idp, now: list[float]
) -> None:
    assert idp.asked == 1
    idp.keys["two"] = ec.generate_private_key(ec.SECP256R1())
    now[0] += 31
    for _ in range(3):
        with pytest.raises(Unavailable):
            provider.caller_of(idp.token("two"))
    await provider.look()
    assert provider.caller_of(idp.token("two")).owner == "oidc~alice"
    for kid in range(100):
        with pytest.raises(Unauthenticated):
            provider.caller_of(idp.token(str(kid), key=idp.keys["one"]))
        await provider.look()
    assert idp.asked == 2
    # A key that is no longer published counts no longer.
    old = idp.token("one")
    del idp.keys["one"]
    now[0] += 301
    await provider.look()
    with pytest.raises(TinsmithError):
        provider.caller_of(old)


async def test_while_the_provider_is_away_its_keys_count_for_an_hour(
    provider: Provider, idp: Idp, now: list[float]
) -> None:
    idp.away = True
    now[0] += 3590
    with pytest.raises(Unavailable):
        await provider.look()
    assert provider.caller_of(idp.token()).owner == "oidc~alice"
    now[0] += 20
    with pytest.raises(Unavailable):
        provider.caller_of(idp.token())
    idp.away = False
    # A provider that fails is asked no more often than one that answers.
    await provider.look()
    with pytest.raises(Unavailable):
        provider.caller_of(idp.token())
    now[0] += 30
    await provider.look()
    assert provider.caller_of(idp.token()).owner == "oidc~alice"


def test_before_the_keys_are_known_nobody_can_tell(settings: ProviderSettings, idp: Idp) -> None:
    with pytest.raises(Unavailable):
        Provider(settings).caller_of(idp.token())


async def test_only_so_many_keys_are_taken(settings: ProviderSettings, idp: Idp) -> None:
    idp.keys |= {str(number): idp.keys["one"] for number in range(100)}
    with pytest.raises(Unavailable, match="101 keys"):
        await Provider(settings).look()


@pytest.mark.parametrize(
    "wrong",
    [
        {"audience": ""},
        {"issuer": ""},
        {"jwks_url": ""},
        {"owner_claim": ""},
        {"jwks_url": "http://login.example.com/keys"},
    ],
)
def test_settings_that_would_let_anybody_in_are_refused(
    settings: ProviderSettings, wrong: dict[str, str]
) -> None:
    settings.check()
    ProviderSettings().check()
    with pytest.raises(InvalidRequest):
        replace(settings, **wrong).check()
