"""What is kept of a key, and what may be said of it."""

import logging

import pytest

from services.common.contract.errors import InvalidRequest
from services.common.telemetry.logs import JsonFormatter, LineFormatter
from services.gateway.identity.key import KeyRecord, Rights, mint, shown


def test_a_record_is_its_keys_and_no_other_ones_and_does_not_hold_it() -> None:
    record, key = mint(Rights("alice"), 1.0)
    other, another = mint(Rights("alice"), 1.0)
    assert key.startswith(f"tml-{record.id}-")
    assert record.is_of(key)
    assert not record.is_of(another)
    assert not record.is_of(key[:-1])
    assert not record.is_of("")
    assert key.split("-", 2)[2] not in repr(record)
    assert record.salt != other.salt


def test_a_record_without_a_digest_is_no_keys() -> None:
    assert not KeyRecord(id="x", owner="alice").is_of("")


@pytest.mark.parametrize("key", ["tml-alice", "tml-0123456789abcdef", "x" * 100, "a\nb"])
def test_what_is_shown_of_a_key_is_not_the_key(key: str) -> None:
    assert key not in shown(key)
    assert "\n" not in shown(key)


@pytest.mark.parametrize("form", [LineFormatter("gateway-0"), JsonFormatter("gateway-0")])
@pytest.mark.parametrize("key", ["tml-wrong-and-secret", "tml-0123456789abcdef", "Bearer abcdefghijk"])
def test_what_is_shown_of_a_key_stands_in_the_log(form: logging.Formatter, key: str) -> None:
    record = logging.LogRecord("door", logging.WARNING, "", 0, "refused %s", (shown(key),), None)
    line = form.format(record)
    assert key[:7] in line
    assert key[:8] not in line
    assert "hidden" not in line


def test_what_is_shown_of_a_key_of_ours_is_its_id() -> None:
    record, key = mint(Rights("alice"), 1.0)
    assert shown(key) == f"key {record.id}"


@pytest.mark.parametrize(
    ("rights", "field"),
    [
        (Rights(""), "owner"),
        (Rights("a b"), "owner"),
        (Rights("x" * 65), "owner"),
        (Rights("alice", role="root"), "role"),
        (Rights("alice", scopes=("everything",)), "scopes"),
        (Rights("alice", role="admin", scopes=("train",)), "scopes"),
        (Rights("alice", note="two\nlines"), "note"),
    ],
)
def test_rights_that_no_key_can_have_are_refused(rights: Rights, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        mint(rights, 1.0)
    assert caught.value.field == field
