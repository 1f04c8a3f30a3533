"""The served tokenizer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.gateway.text.tokenizer import Tokenizer
from services.launcher.tiny_model import write_tokenizer

_LONG = "hello there friend " * 30_000


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    write_tokenizer(tmp_path, 512, 1024)
    return Tokenizer((tmp_path / "tokenizer.json").read_text(), "", {})


@contextmanager
def ticking() -> Iterator[Callable[[], int]]:
    """Another thread that wakes again and again: how often it did."""
    over, ticks = threading.Event(), 0

    def tick() -> None:
        nonlocal ticks
        while not over.is_set():
            time.sleep(0.001)
            ticks += 1

    other = threading.Thread(target=tick)
    other.start()
    try:
        yield lambda: ticks
    finally:
        over.set()
        other.join()


def test_nobody_is_kept_waiting_while_a_long_text_becomes_tokens_and_these_a_text(
    tokenizer: Tokenizer,
) -> None:
    with ticking() as ticks:
        before = ticks()
        tokens = tokenizer.tokens(_LONG, special=False)
        assert ticks() - before > 20
        before = ticks()
        assert tokenizer.text(tokens * 10) == _LONG * 10
        assert ticks() - before > 20
