"""Models that train all weights: worlds of one and two ranks, every ZeRO stage, against plain PyTorch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from services.launcher.tiny_model import make_tiny_model
from tests.component.engine.data import VOCAB
from tests.component.engine.full import bfloat16
from tests.component.engine.full.world import ADAM_FULL, PROBE, STEPS, Report
from tests.component.engine.process import play
from tests.component.engine.reference import ReferenceModel, values

pytestmark = pytest.mark.heavy

# Ranks, the trainer's ZeRO stage, whether the optimizer is on the CPU, whether the head is the embedding.
WORLDS = {
    "1 rank": (1, 0, False, True),
    "2 ranks ZeRO-1": (2, 1, False, True),
    "2 ranks ZeRO-2 offloaded": (2, 2, True, False),
    "2 ranks ZeRO-3": (2, 3, False, False),
}


def make_model(path: Path, tied: bool) -> Path:
    return make_tiny_model(path / f"tied-{tied}", vocab=VOCAB, layers=2, tie_embeddings=tied)


@pytest.fixture(scope="module", params=WORLDS)
def played(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[Report], Path]:
    ranks, stage, offload, tied = WORLDS[request.param]
    out = tmp_path_factory.mktemp("world")
    directory = make_model(out, tied)
    return play("full.world", directory, out, Report, ranks, stage, offload), directory


@pytest.fixture
def report(played: tuple[list[Report], Path]) -> Report:
    return played[0][0]


@pytest.fixture
def directory(played: tuple[list[Report], Path]) -> Path:
    return played[1]


def test_training_equals_a_plain_pytorch_loop(report: Report, directory: Path) -> None:
    reference = ReferenceModel(directory, train_all=True)
    reference.assert_same_adapter(report.states["fresh"].adapter, tolerance=0)
    for number, (loss_fn, rows) in enumerate(STEPS):
        for row, result in zip(rows, report.results[number], strict=True):
            expected = reference.logprobs(row).detach().numpy()
            np.testing.assert_allclose(values(result.outputs["logprobs"]), expected, rtol=0, atol=1e-5)
            loss = float(reference.loss(row, loss_fn).detach())
            assert result.metrics["loss:sum"] == pytest.approx(loss, rel=1e-4, abs=1e-4)
        before = {name: value.detach().clone() for name, value in reference.parameters.items()}
        norm = reference.step(rows, loss_fn, ADAM_FULL)
        assert norm > ADAM_FULL.grad_clip_norm, "the step is to be clipped"
        change = sum(
            float((value.detach() - before[name]).double().square().sum())
            for name, value in reference.parameters.items()
        )
        step = report.steps[number]
        assert step["grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert step["update_norm"] == pytest.approx(change**0.5, rel=1e-4)
        assert step["learning_rate"] == ADAM_FULL.learning_rate
        state = report.states[f"step{number}"]
        assert state.step == number + 1 and state.lora is None
        reference.assert_same_adapter(state.adapter, tolerance=1e-6)


def test_an_output_head_computes_each_position_once_for_values_and_gradient(
    played: tuple[list[Report], Path],
) -> None:
    reports, _ = played
    for number, (_, rows) in enumerate(STEPS):
        # One without rows computes a position of nobody's.
        idle = sum(report.heads[number] for report in reports) - sum(row.length for row in rows)
        assert idle in (0, 1)


def test_adapters_go_on_with_the_base_model(report: Report, directory: Path) -> None:
    base = ReferenceModel(directory).logprobs(PROBE[0]).numpy()
    (adapter,), (full,) = report.probes["lora"], report.probes["full"]
    np.testing.assert_allclose(values(adapter.outputs["logprobs"]), base, rtol=0, atol=1e-5)
    assert np.abs(values(full.outputs["logprobs"]) - base).max() > 1e-2


def test_a_forward_pass_leaves_no_gradient(report: Report) -> None:
    assert report.skipped["skipped"] == 1


def test_a_saved_model_goes_on_bit_for_bit(report: Report) -> None:
    assert report.states["loaded"] == report.states["step2"]
    assert report.states["again resumed"] == report.states["full resumed"]
    assert report.states["full resumed"].adapter != report.states["step2"].adapter


def test_a_gradient_that_is_not_finite_is_dropped(report: Report) -> None:
    assert report.refusals["non-finite"] == "non_finite_gradient"
    assert report.states["after non-finite"] == report.states["full resumed"]
    assert report.states["no pending gradient"] == report.states["full resumed"]


def test_weights_can_be_loaded_without_the_optimizer(report: Report) -> None:
    loaded = report.states["without optimizer"]
    assert loaded.adapter == report.states["step2"].adapter
    assert (loaded.step, loaded.optimizer) == (0, {})
    (before,), (after,) = report.probes["full"], report.probes["reloaded"]
    assert after.outputs == before.outputs


def test_a_state_that_one_rank_sees_damaged_is_refused_on_all_ranks(
    played: tuple[list[Report], Path],
) -> None:
    for report in played[0]:
        assert report.refusals["damaged on one rank"] == "data_loss"
        assert report.states["after damaged"] == report.states["no pending gradient"]


def test_a_state_of_another_kind_is_refused_on_all_ranks(played: tuple[list[Report], Path]) -> None:
    for report in played[0]:
        for name in ("tensor missing", "adapter", "not an adapter"):
            assert report.refusals[name] == "state_mismatch", name


def test_what_computes_is_what_the_masters_are(played: tuple[list[Report], Path]) -> None:
    first, *others = played[0]
    assert first.states["weights"].adapter == first.states["step2"].adapter
    for report in others:
        assert report.states["weights"].adapter in ({}, first.states["weights"].adapter)


def test_under_bfloat16_masters_follow_the_float32_loop_and_a_bad_gradient_is_dropped(tmp_path: Path) -> None:
    directory = make_model(tmp_path, tied=True)
    kind = bfloat16.Report
    reports = play("full.bfloat16", directory, tmp_path, kind, ranks=2, stage=0, dtype="bfloat16")
    reference = ReferenceModel(directory, train_all=True)
    before = {name: value.detach().numpy().copy() for name, value in reference.parameters.items()}
    norms = [reference.step(rows, loss_fn, ADAM_FULL) for loss_fn, rows in STEPS]
    after = {name: value.detach().numpy() for name, value in reference.parameters.items()}
    assert reports[0].played.keys() == set(bfloat16.STAGES)
    for stage, played in reports[0].played.items():
        fresh, trained, loaded = played.states
        assert [step["grad_norm"] for step in played.steps] == pytest.approx(norms, rel=0.03)
        assert all(step["update_norm"] > 0 for step in played.steps)
        for name, array in trained.adapter.items():
            change = values(array) - values(fresh.adapter[name])
            wanted = after[name] - before[name]
            assert np.linalg.norm(change - wanted) <= 0.1 * np.linalg.norm(wanted), name
        for row, result in zip(PROBE, played.probe, strict=True):
            expected = reference.logprobs(row).detach().numpy()
            np.testing.assert_allclose(values(result.outputs["logprobs"]), expected, rtol=0, atol=0.1)
        for number, (_, rows) in enumerate(STEPS):
            heads = sum(report.played[stage].heads[number] for report in reports)
            assert heads - sum(row.length for row in rows) in (0, 1)
        assert played.refusal == "non_finite_gradient"
        assert loaded == trained
        assert played.weights is not None
        for name, array in played.weights.adapter.items():
            master = torch.from_numpy(values(trained.adapter[name]).copy()).to(torch.bfloat16)
            assert array.data == master.view(torch.int16).numpy().tobytes(), name
