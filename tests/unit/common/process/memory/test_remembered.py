"""What is asked for many times in a row is made once, and what is large is not kept of many."""

from __future__ import annotations

import gc
import weakref

import pytest

from services.common.process.memory.remembered import Remembered


class Made:
    """Of a name."""

    def __init__(self, name: str) -> None:
        if not name:
            raise ValueError("no name")


@pytest.mark.parametrize("large", [False, True])
def test_what_is_asked_for_again_is_made_once(large: bool) -> None:
    made = Remembered(Made)
    assert made(large, "a") is made(large, "a")
    assert made(large, "a") is not made(large, "b")


def test_small_results_are_kept_while_others_are_asked_for_and_not_without_end() -> None:
    made = Remembered(Made)
    first = made(False, "a")
    for number in range(200):
        made(False, f"small {number}")
        made(True, f"large {number}")
    assert made(False, "a") is first
    for number in range(256):
        made(False, f"other {number}")
    assert made(False, "a") is not first


def test_of_large_results_only_the_last_is_kept() -> None:
    made = Remembered(Made)
    kept = [weakref.ref(made(True, f"{number}")) for number in range(3)]
    gc.collect()
    assert [ref() is not None for ref in kept] == [False, False, True]


def test_what_is_refused_is_refused_each_time() -> None:
    made = Remembered(Made)
    for _ in range(2):
        with pytest.raises(ValueError, match="no name"):
            made(False, "")
