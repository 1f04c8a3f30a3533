"""The thread that an engine runs on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from services.common.process.threads import WorkerThread


@pytest.fixture
def thread() -> Iterator[WorkerThread]:
    thread = WorkerThread("engine")
    yield thread
    thread.close()
