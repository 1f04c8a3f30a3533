"""Who shares what of the tests that several processes run (scripts/test.sh)."""

from __future__ import annotations

from pathlib import PurePath

import pytest

SHARED = ("sampler", "worlds")
"""What is started once, and takes a while: those who use it stay in one process."""
CLUSTER = "cluster"
"""Every process has one of its own, and those of a folder stay in one."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Several processes (loadgroup) take whole files, or all that share one thing. Before xdist looks."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item)))


def _group(item: pytest.Item) -> str:
    used = getattr(item, "fixturenames", ())
    file = item.nodeid.partition("::")[0]
    alone = str(PurePath(file).parent) if CLUSTER in used else file
    return next((name for name in SHARED if name in used), alone)
