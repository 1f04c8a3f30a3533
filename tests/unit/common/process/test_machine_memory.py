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
