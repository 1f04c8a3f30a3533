"""The oldest version of the SDK, a middle one and the newest do here what docs/compatibility.md says of them.

`make test-sdks` tries all of them.
"""

from __future__ import annotations

import pytest

from tests.cluster.conftest import Cluster
from tests.cluster.contract.compatibility import page
from tests.sdks import table
from tests.sdks.releases import SOME, Unavailable, steps


@pytest.mark.parametrize("version", SOME)
def test_a_version_of_the_sdk_does_what_the_page_says(cluster: Cluster, version: str) -> None:
    try:
        told = steps(cluster, version)
    except Unavailable as error:
        pytest.skip(f"tinker {version} is not to be had here: {error}")
    assert table.line(version, told) in page.PAGE.read_text().splitlines()
