"""A rank that has no memory for a sequence which all compute together fails its operation and no other."""

from __future__ import annotations

import pytest

from tests.component.engine.ranks.worlds import Reports

pytestmark = pytest.mark.heavy


def test_a_rank_without_memory_fails_the_operation_on_all_ranks_and_no_other(
    worlds: dict[str, list[Reports]],
) -> None:
    reports = [report.memory for report in worlds["2 ranks"] if report.memory is not None]
    assert len(reports) == 2
    for kind in ("adapter", "full"):
        (failed,), (result,) = reports[0].without[kind].results, reports[0].enough[kind].results
        assert failed.failure is not None and result.failure is None
        assert failed.failure.code == "out_of_memory"
        assert "40 tokens, which all ranks compute together" in failed.failure.message
        for report in reports:
            # Nothing of it is left, and the other model has the gradient that it had.
            assert report.without[kind].step["skipped"] == 1
            assert "skipped" not in report.enough[kind].step
            assert report.without[kind].beside == report.enough[kind].beside
