"""API keys: who is let in, and as whom."""

from pathlib import Path

import pytest

from services.common.contract.errors import Unauthenticated
from services.gateway.access.auth import KeyRing


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "keys"
    path.write_text(text)
    return path


def test_a_named_key_belongs_to_its_name(tmp_path: Path) -> None:
    ring = KeyRing(write(tmp_path, "# staff\ntml-one alice\n\ntml-two bob\n"))
    assert ring.owner_of("tml-one") == "alice"
    assert ring.owner_of("tml-two") == "bob"


def test_a_key_without_a_name_has_one_stable_owner_that_does_not_tell_the_key(tmp_path: Path) -> None:
    path = write(tmp_path, "tml-secret\n")
    owner = KeyRing(path).owner_of("tml-secret")
    assert owner == KeyRing(path).owner_of("tml-secret")
    assert owner.startswith("key-")
    assert "secret" not in owner


@pytest.mark.parametrize("key", [None, "", "tml-on", "tml-onee", "alice"])
def test_anything_but_a_key_is_refused(tmp_path: Path, key: str | None) -> None:
    ring = KeyRing(write(tmp_path, "tml-one alice\n"))
    with pytest.raises(Unauthenticated):
        ring.owner_of(key)


def test_an_empty_file_lets_nobody_in(tmp_path: Path) -> None:
    ring = KeyRing(write(tmp_path, "\n# none yet\n"))
    with pytest.raises(Unauthenticated):
        ring.owner_of("tml-one")


def test_a_line_with_three_words_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="line 2"):
        KeyRing(write(tmp_path, "tml-one alice\ntml-two bob smith\n"))


def test_keys_added_and_removed_take_effect_without_a_restart(tmp_path: Path) -> None:
    clock = Clock()
    path = write(tmp_path, "tml-one alice\n")
    ring = KeyRing(path, clock)
    path.write_text("tml-three carol\n")
    clock.now += 5
    assert ring.owner_of("tml-three") == "carol"
    with pytest.raises(Unauthenticated):
        ring.owner_of("tml-one")


def test_a_mistyped_or_missing_file_keeps_the_keys_read_before(tmp_path: Path) -> None:
    clock = Clock()
    path = write(tmp_path, "tml-one alice\n")
    ring = KeyRing(path, clock)
    path.write_text("tml-one too many words here\n")
    clock.now += 5
    assert ring.owner_of("tml-one") == "alice"
    path.unlink()
    clock.now += 5
    assert ring.owner_of("tml-one") == "alice"
