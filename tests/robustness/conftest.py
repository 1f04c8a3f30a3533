"""The table of faults at the end of the output."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.robustness.report import Report

TOTAL = Report()


@pytest.fixture(scope="session")
def total() -> Report:
    """Adds the rounds of this test session up."""
    return TOTAL


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from services.launcher.tiny_model import make_tiny_model
    from tests.cluster.conftest import CONTEXT, VOCAB

    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_model(
        directory, vocab=VOCAB, hidden=64, layers=2, heads=2, kv_heads=1, intermediate=128, context=CONTEXT
    )
    return directory


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if TOTAL.injected:
        terminalreporter.section("faults")
        terminalreporter.write_line(TOTAL.markdown())
