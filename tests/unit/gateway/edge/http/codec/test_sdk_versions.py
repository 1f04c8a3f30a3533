"""What versions of the SDK are told."""

from __future__ import annotations

import pytest

from services.common.contract.errors import InvalidRequest
from services.gateway.edge.http.codec.sdk_versions import warning


@pytest.mark.parametrize("version", ["0.9.0", "0.18.2", "0.19.0"])
def test_a_version_that_cannot_read_results_is_refused(version: str) -> None:
    with pytest.raises(InvalidRequest, match=r"tinker>=0\.28"):
        warning(version)


@pytest.mark.parametrize(
    ("version", "says"),
    [("0.20.0", "exports"), ("0.27.2", "exports")],
)
def test_a_version_of_which_something_is_missing_learns_what(version: str, says: str) -> None:
    told = warning(version)
    assert told is not None and says in told and version in told


@pytest.mark.parametrize(
    "version", ["0.28.0", "0.38.0", "1.0", "", "a", "9" * 99 + ".1", "my-client/1.0", "v0.19"]
)
def test_of_other_versions_nothing_is_said(version: str) -> None:
    assert warning(version) is None
