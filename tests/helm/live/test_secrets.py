"""Secrets of ones own: helm, with a cluster to ask, refuses one that lacks what the chart needs of it."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator

import pytest

from tests.helm.live.api import cluster
from tests.helm.rendered import Values

Asked = Callable[[Values], str]

ENTRIES = {
    "apiKeys.existingSecret": ("api-keys",),
    "huggingFace.existingSecret": ("token",),
    "gateway.tls.existingSecret": ("tls.crt", "tls.key"),
    "redis.externalSecret": ("url",),
    "redis.existingSecret": ("password", "gateway", "trainer", "sampler"),
    "mtls.existingSecrets.trainer": ("ca.crt", "tls.crt", "tls.key"),
}


@pytest.fixture
def secrets() -> dict[str, dict[str, str]]:
    """Those that the cluster has, with their entries."""
    return {}


@pytest.fixture
def rendered(secrets: dict[str, dict[str, str]]) -> Iterator[Asked]:
    """What helm says to values while a cluster has these Secrets; empty: it takes them."""
    with cluster() as found:

        def ask(values: Values) -> str:
            found.objects["secrets"] = {
                name: {
                    "data": {entry: base64.b64encode(text.encode()).decode() for entry, text in data.items()}
                }
                for name, data in secrets.items()
            }
            return found.refusal(values)

        yield ask


def naming(value: str) -> Values:
    """Values in which one names the Secret "mine"."""
    made: Values = {"mtls": {"enabled": True, "issuerRef": {"name": "ca"}}} if "mtls" in value else {}
    at = made
    *path, last = value.split(".")
    for part in path:
        at = at.setdefault(part, {})
    at[last] = "mine"
    return made


@pytest.mark.parametrize("value", ENTRIES)
def test_a_secret_without_an_entry_that_is_needed_is_refused_and_the_entry_named(
    rendered: Asked, secrets: dict[str, dict[str, str]], value: str
) -> None:
    whole = dict.fromkeys(ENTRIES[value], "x")
    for entry in ENTRIES[value]:
        for lacking in ({name: text for name, text in whole.items() if name != entry}, {**whole, entry: ""}):
            # A file without a key is one: keys are made with `tinsmith keys`.
            if value == "apiKeys.existingSecret" and lacking:
                continue
            secrets["mine"] = lacking
            assert f'Secret "mine" ({value}) has no entry "{entry}"' in rendered(naming(value))
    secrets["mine"] = {**whole, "another": "y"}
    assert rendered(naming(value)) == ""


def test_a_secret_that_is_not_there_yet_is_for_somebody_else_to_make(rendered: Asked) -> None:
    for value in ENTRIES:
        assert rendered(naming(value)) == ""
