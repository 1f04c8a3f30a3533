"""What tests of the executor share."""

from __future__ import annotations

import pytest

from services.trainer.execution import held_up


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is put off is tried again at once."""
    monkeypatch.setattr(held_up, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(held_up, "LONGEST_PAUSE_S", 0.002)
