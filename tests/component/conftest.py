"""Who of the component tests shares what, where several processes run them."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED = ("sampler", "worlds", "trainer_service")
"""What is started once, and takes a while: those who use it stay in one process."""


LONGEST = (
    "tests/component/trainer/test_nodes.py",
    "sampler",
    "tests/component/sampler/test_lifecycle.py",
    "worlds",
    "tests/component/test_models_of_a_hub.py",
    "tests/component/trainer/test_restarts.py",
    "tests/component/trainer/test_full.py",
    "tests/component/trainer/test_parts.py",
    "tests/component/test_gpu_bench.py",
    "tests/component/sampler/test_start.py",
)
"""What takes a minute and more, whatever the number of its tests: begun last, it would run alone."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Several processes (loadgroup) take whole files, or all that share one thing, the longest first. Before
    xdist looks."""
    groups = {item: group_of(item) for item in items if item.path.is_relative_to(Path(__file__).parent)}
    for item, group in groups.items():
        item.add_marker(pytest.mark.xdist_group(group))
    ranks = {group: rank for rank, group in enumerate(LONGEST)}
    in_order = iter(sorted(groups, key=lambda item: ranks.get(groups[item], len(ranks))))
    items[:] = [next(in_order) if item in groups else item for item in items]


def group_of(item: pytest.Item) -> str:
    used = getattr(item, "fixturenames", ())
    return next((name for name in SHARED if name in used), item.nodeid.partition("::")[0])
