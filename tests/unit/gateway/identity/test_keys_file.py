"""The file of keys: who is in it, and what its mistakes do."""

import pytest

from services.gateway.identity.key import Rights, mint
from services.gateway.identity.keys_file import line_of, parse


def test_a_line_is_a_key_and_its_owner_and_what_it_may() -> None:
    found = parse("# staff\n\ntml-one alice\ntml-two bob role=read scopes=train,sample expires=2027-01-31\n")
    assert not found.wrong
    one, two = found.find("tml-one"), found.find("tml-two")
    assert one is not None
    assert (one.owner, one.role, one.scopes, one.expires_at) == ("alice", "user", (), None)
    assert two is not None
    assert (two.owner, two.role, two.scopes) == ("bob", "read", ("sample", "train"))
    assert two.expires_at == 1801353600
    for other in ("tml-on", "tml-onee", "alice", "#"):
        assert found.find(other) is None


def test_a_line_may_hold_a_hash_in_place_of_the_key() -> None:
    record, key = mint(Rights("alice", "read", ("train",), 2e9), 1.0)
    _, another = mint(Rights("alice"), 1.0)
    line = line_of(record)
    assert key not in line
    found = parse(line)
    known = found.find(key)
    assert known is not None
    assert (known.id, known.rights) == (record.id, record.rights)
    assert found.find(another) is None
    assert found.find(f"tml-{record.id}-{'x' * 43}") is None
    assert found.find(line.split()[0]) is None


def test_keys_are_found_by_their_id_however_they_stand_there() -> None:
    record, key = mint(Rights("alice"), 1.0)
    found = parse(f"{line_of(record)}\n{key} bob\ntml-one carol\n")
    assert sorted(one.owner for one in found.of_id(record.id)) == ["alice", "bob"]
    other = found.find("tml-one")
    assert other is not None
    assert found.of_id(other.id) == [other]
    assert found.of_id("nobody") == []


@pytest.mark.parametrize(
    "line",
    [
        "tml-new",
        "tml-new bob smith",
        "tml-new bob role=root",
        "tml-new bob scopes=",
        "tml-new bob role=user role=admin",
        "tml-new bob expires=soon",
        "new bob",
        "hash:0:1:2 bob",
        "tml-new bob/../x",
    ],
)
def test_a_line_that_cannot_be_read_lets_nobody_in_and_the_others_do(line: str) -> None:
    found = parse(f"tml-one alice\n{line}\n")
    assert [number for number, _ in found.wrong] == [2]
    assert found.find("tml-one") is not None
    for key in ("tml-new", "new", "hash:0:1:2"):
        assert found.find(key) is None
