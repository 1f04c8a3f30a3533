"""How much memory a process may count on."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from services.common.process import process


def test_the_memory_of_a_container_is_what_it_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = int(psutil.virtual_memory().total)
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(process, "_MEMORY_LIMIT", limit)
    assert process.machine_memory() == total
    for text, wanted in (("max\n", total), (f"{1 << 30}\n", 1 << 30), (f"{total * 2}\n", total)):
        limit.write_text(text)
        assert process.machine_memory() == wanted


def test_what_is_free_is_what_the_machine_and_the_container_have_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_MEMORY_LIMIT", "_MEMORY_USED", "_MEMORY_KINDS", "_MACHINE"):
        monkeypatch.setattr(process, name, tmp_path / name)
    total = process.machine_memory()
    assert process.free_machine_memory() == total
    (tmp_path / "_MACHINE").write_text("MemTotal:  999 kB\nMemAvailable:   5000 kB\n")
    assert process.free_machine_memory() == 5000 * 1024
    (tmp_path / "_MEMORY_USED").write_text("3000000\n")
    (tmp_path / "_MEMORY_KINDS").write_text("anon 1\ninactive_file 500000\n")
    for limit, wanted in (("max", 5000 * 1024), ("4000000", 1_500_000), ("1000000", 0)):
        (tmp_path / "_MEMORY_LIMIT").write_text(f"{limit}\n")
        assert process.free_machine_memory() == wanted


def test_this_machine_says_what_is_free() -> None:
    assert 0 < process.free_machine_memory() < process.machine_memory()
