"""Versions of the tinker SDK against one cluster: which steps each can do stands in docs/compatibility.md.

`make test-sdks` runs it: it installs every version, without its dependencies, which are those of the
project's own environment. `make test-sdks WRITE=1` writes the table anew. Its short form is
tests/cluster/contract/test_sdk_versions.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import Cluster, model_dir, start_cluster, stop_cluster
from tests.cluster.contract.compatibility import page
from tests.sdks import table
from tests.sdks.releases import VERSIONS, steps

WRITE = "TINSMITH_WRITE_COMPATIBILITY"

__all__ = ["model_dir"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Cluster]:
    running = start_cluster(tmp_path_factory.mktemp("sdks"), model_dir)
    yield running
    stop_cluster(running)


@pytest.mark.timeout(1800)
def test_every_version_does_what_the_table_says(cluster: Cluster) -> None:
    found = {version: steps(cluster, version) for version in VERSIONS}
    assert set(found[VERSIONS[-1]].values()) == {"works"}
    written = page.PAGE.read_text()
    new = page.with_tables(written, "sdks", table.table(found))
    if os.environ.get(WRITE):
        page.PAGE.write_text(new)
    else:
        assert new == written, "docs/compatibility.md is stale; run make test-sdks WRITE=1"
