"""Encryption of exported files."""

from __future__ import annotations

import errno
from pathlib import Path

import pyrage
import pytest

from services.common.contract.errors import InvalidRequest, StorageFull
from services.common.storage.base import failure
from services.common.storage.directory import publish_directory
from services.common.storage.encryption import encrypted, parse_recipients

SSH = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHsKLqeplhpW+uObz5dvMgjz1OxfM/XXUB+VHtZ6isGN alice@example"


def test_each_recipient_can_open_every_file_and_nobody_else(tmp_path: Path) -> None:
    ann, ben, eve = (pyrage.x25519.Identity.generate() for _ in range(3))
    files = {"a": lambda path: path.write_bytes(b"one" * 100_000), "b": lambda path: path.write_text("two")}
    sealed = encrypted(files, [str(ann.to_public()), str(ben.to_public())])
    size = publish_directory(tmp_path / "out", sealed, replace=False)
    found = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert sorted(found) == ["a.age", "b.age"]
    assert size == sum(map(len, found.values()))
    for identity in (ann, ben):
        assert pyrage.decrypt(found["a.age"], [identity]) == b"one" * 100_000
        assert pyrage.decrypt(found["b.age"], [identity]) == b"two"
    with pytest.raises(pyrage.DecryptError):
        pyrage.decrypt(found["b.age"], [eve])


def test_keys_of_age_and_ssh_are_taken_and_others_named_with_their_place() -> None:
    key = str(pyrage.x25519.Identity.generate().to_public())
    assert len(parse_recipients([key, SSH])) == 2
    with pytest.raises(InvalidRequest, match=r"age_encryption_recipients\[1\]"):
        parse_recipients([key, "age1nonsense"])
    with pytest.raises(InvalidRequest, match="at most 10"):
        parse_recipients([key] * 11)


def test_a_full_disk_is_seen_through_the_encryption(tmp_path: Path) -> None:
    """/dev/full takes no byte."""
    key = str(pyrage.x25519.Identity.generate().to_public())
    (write,) = encrypted({"a": lambda path: path.write_bytes(b"x" * 100_000)}, [key]).values()
    (tmp_path / "a.age").symlink_to("/dev/full")
    with pytest.raises(OSError, match="encrypting") as caught:
        write(tmp_path / "a.age")
    assert caught.value.errno == errno.ENOSPC
    assert isinstance(failure(caught.value, "x"), StorageFull)
    assert [path.name for path in tmp_path.iterdir()] == ["a.age"]
