"""URLs of sentinels are read, or refused with a sentence."""

from __future__ import annotations

import pytest

from services.common.contract.errors import InvalidRequest
from services.common.state import redis_client
from services.common.state.redis_client import Sentinels, parse


def test_other_urls_are_left_as_they_are() -> None:
    for url in ("redis://:pw@host:6379/0", "rediss://host/1?ssl_ca_certs=/ca.crt", "unix:///run/redis.sock"):
        assert parse(url) == (url, None)


def test_sentinels_the_service_and_what_the_servers_ask_for_are_read() -> None:
    url, sentinels = parse("redis+sentinel://me:p%40w@one:1234,two,[::1]:5/main/3?sentinel_password=other")
    assert url == "redis://me:p%40w@main/3"
    assert sentinels == Sentinels((("one", 1234), ("two", 26379), ("::1", 5)), "main", {"password": "other"})


def test_tls_is_for_sentinels_and_servers() -> None:
    url, sentinels = parse("rediss+sentinel://one/main?ssl_ca_certs=/etc/ca.crt")
    assert url == "rediss://main/0?ssl_ca_certs=/etc/ca.crt"
    assert sentinels is not None
    assert sentinels.settings == {"ssl": True, "ssl_ca_certs": "/etc/ca.crt"}


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://one:26379",
        "redis+sentinel:///main",
        "redis+sentinel://one/main/zero",
        "redis+sentinel://one:port/main",
        "redis+sentinel://one/main?timeout=3",
    ],
)
def test_what_is_not_one_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest):
        redis_client.connect(url)
