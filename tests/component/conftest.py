"""Who of the component tests shares what, where several processes run them."""

from __future__ import annotations

import pytest

SHARED = ("sampler", "worlds", "trainer_service")
"""What is started once, and takes a while: those who use it stay in one process."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Several processes (loadgroup) take whole files, or all that share one thing. Before xdist looks."""
    for item in items:
        used = getattr(item, "fixturenames", ())
        group = next((name for name in SHARED if name in used), item.nodeid.partition("::")[0])
        item.add_marker(pytest.mark.xdist_group(group))
