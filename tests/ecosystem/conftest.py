"""One cluster with a tiny model, and a directory in which the cookbook's recipes find what they need.

COOKBOOK_TABLE=FILE has the rows of what ran written into FILE (docs/cookbook.md), and the plot of the long
run beside it.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.machine import facts
from tests.cluster.conftest import start_cluster, stop_cluster
from tests.ecosystem import data
from tests.ecosystem.recipes import POLICY, TEACHER, Kitchen, Run, lay_out_tokenizer
from tests.ecosystem.report import Row, draw, write

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def kitchen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kitchen]:
    from tests.ecosystem.guesser import make_guesser

    model = make_guesser(tmp_path_factory.mktemp("model") / "guesser")
    directory = tmp_path_factory.mktemp("kitchen")
    lay_out_tokenizer(directory / POLICY, model)
    data.write_all(directory)
    # Recipes ask for stable_reinforce unless they are told otherwise.
    running = start_cluster(
        tmp_path_factory.mktemp("cookbook"), model, "--stable-reinforce-as", "ppo", name=POLICY, timeout=600
    )
    yield Kitchen(directory, running)
    left = stop_cluster(running)
    assert left == [], f"processes left behind: {left}"


class Table:
    """Collects the rows of docs/cookbook.md, and the rewards of the run that is drawn there."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.long_run: list[float] = []

    def add(self, recipe: str, run: Run, steps: int, moved: str) -> None:
        command = re.sub(r"tinker://\S+", "CHECKPOINT", run.command.replace(POLICY, "POLICY"))
        self.rows.append(Row(recipe, command, steps, moved, run.seconds, _machine()))


@pytest.fixture(scope="session")
def table() -> Iterator[Table]:
    collected = Table()
    yield collected
    target = os.environ.get("COOKBOOK_TABLE")
    if target and collected.rows:
        write(
            ROOT / target,
            collected.rows,
            cookbook=importlib.metadata.version("tinker-cookbook"),
            policy=POLICY,
            teacher=TEACHER,
        )
        if collected.long_run:
            draw((ROOT / target).with_suffix(".svg"), collected.long_run)


def _machine() -> str:
    found = facts(ROOT)
    return f"{found['cores']} cores of {found['cpu']}"
