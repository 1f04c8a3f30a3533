"""API keys: who is let in, and as whom."""

import asyncio
import contextlib
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
    path = write(tmp_path, "tml-one alice\n")
    ring = KeyRing(path)
    path.write_text("tml-three carol\n")
    ring.look()
    assert ring.owner_of("tml-three") == "carol"
    with pytest.raises(Unauthenticated):
        ring.owner_of("tml-one")


async def test_a_ring_that_is_started_sees_changes_by_itself(tmp_path: Path) -> None:
    path = write(tmp_path, "tml-one alice\n")
    ring = KeyRing(path)
    await ring.start()
    path.write_text("tml-three carol\n")
    async with asyncio.timeout(10):
        while True:
            with contextlib.suppress(Unauthenticated):
                assert ring.owner_of("tml-three") == "carol"
                break
            await asyncio.sleep(0.05)
    await ring.stop()


def test_a_key_that_is_taken_out_is_out_although_another_line_is_mistyped(tmp_path: Path) -> None:
    path = write(tmp_path, "tml-one alice\ntml-two bob\n")
    ring = KeyRing(path)
    path.write_text("tml-one alice\ntml-new too many words\n")
    ring.look()
    assert ring.owner_of("tml-one") == "alice"
    for key in ("tml-two", "tml-new"):
        with pytest.raises(Unauthenticated):
            ring.owner_of(key)


def test_a_file_that_is_gone_lets_nobody_in_after_a_minute_and_comes_back(tmp_path: Path) -> None:
    clock = Clock()
    path = write(tmp_path, "tml-one alice\n")
    ring = KeyRing(path, clock)
    path.unlink()
    clock.now += 59
    with pytest.raises(OSError):
        ring.look()
    assert ring.owner_of("tml-one") == "alice"
    clock.now += 2
    with pytest.raises(OSError):
        ring.look()
    with pytest.raises(Unauthenticated):
        ring.owner_of("tml-one")
    path.write_text("tml-one alice\n")
    ring.look()
    assert ring.owner_of("tml-one") == "alice"
