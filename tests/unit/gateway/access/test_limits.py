"""The bounds of requests, and what their refusals say."""

import pytest

from services.common.contract.errors import InvalidRequest
from services.gateway.access.limits import Limits

LIMITS = Limits()


def refused(check, *args: object) -> str:
    with pytest.raises(InvalidRequest) as caught:
        check(*args)
    return caught.value.message


def test_lifetimes_are_bounded() -> None:
    LIMITS.check_ttl(None)
    LIMITS.check_ttl(3600)
    for ttl in (0, -1, 3599, 10**10):
        assert "ttl_seconds" in refused(LIMITS.check_ttl, ttl)


def test_metadata_is_bounded() -> None:
    LIMITS.check_metadata({"a": "b"})
    assert "user_metadata" in refused(LIMITS.check_metadata, {"a": "b" * 70_000})


def test_pages_are_bounded() -> None:
    LIMITS.check_page(0, 1000)
    assert "limit" in refused(LIMITS.check_page, 0, 1001)
    assert "offset" in refused(LIMITS.check_page, -1, 1)


def test_tags_are_bounded_in_number_and_length() -> None:
    LIMITS.check_tags(["a" * 256] * 64)
    assert "at most 64" in refused(LIMITS.check_tags, ["a"] * 65)
    assert "at most 256" in refused(LIMITS.check_tags, ["a" * 257])
