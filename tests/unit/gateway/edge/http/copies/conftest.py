"""Keys that may have few checkpoints and copies, and a slow storage."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from services.gateway.access.limits import Limits, OwnerLimits
from tests.unit.gateway.edge.http.copies.copying import SlowDisk
from tests.unit.gateway.edges import Edges


@pytest.fixture
def limits() -> Limits:
    return Limits(owners=OwnerLimits(checkpoints=4, downloads=2))


@pytest.fixture
def slow_disk(edges: Edges, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    disk = SlowDisk(edges, monkeypatch)
    yield disk
    disk.goes_on.set()
