"""What a model that trains all weights takes of memory is there on all ranks before any of it changes."""

from __future__ import annotations

import pytest

from services.launcher.tiny_model import make_tiny_model
from tests.component.engine.data import VOCAB
from tests.component.engine.full.memory import KINDS, Report
from tests.component.engine.process import play

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[Report]:
    out = tmp_path_factory.mktemp("world")
    directory = make_tiny_model(out / "model", vocab=VOCAB, layers=2)
    return play("full.memory", directory, out, Report, ranks=2, stage=0)


def test_where_a_rank_has_no_memory_for_it_no_rank_makes_a_model(reports: list[Report]) -> None:
    for report in reports:
        assert report.refused["create_model"] == "out_of_memory"
        assert report.models == []


def test_a_step_for_which_a_rank_has_no_memory_is_refused_and_its_gradient_waits_for_the_next(
    reports: list[Report],
) -> None:
    for report in reports:
        assert report.refused["optim_step"] == "out_of_memory"
        assert not report.skipped
        assert report.states["after a step"] == report.states["fresh"]
        assert report.states["full"] == report.states["twin"]


def test_a_state_for_which_a_rank_has_no_memory_changes_neither_weights_nor_gradient(
    reports: list[Report],
) -> None:
    for report in reports:
        assert report.refused["load_state"] == "out_of_memory"
        assert report.states["after a load"] == report.states["full"]
        assert report.states["full at last"] == report.states["twin at last"]
    assert reports[0].states["full at last"] != reports[0].states["full"]


def test_in_a_step_deepspeed_takes_no_more_of_memory_than_was_taken_before(reports: list[Report]) -> None:
    found = [
        (kind, taken)
        for report in reports
        for kind, steps in zip(KINDS, report.steps, strict=True)
        for taken in steps
    ]
    assert len(found) == 2 * len(KINDS) * len(reports)
    beyond = [f"{kind}: {taken}" for kind, taken in found if not 0 < taken.most <= taken.before]
    assert not beyond, "\n".join(beyond)
