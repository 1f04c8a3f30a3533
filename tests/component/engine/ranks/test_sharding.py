"""What ZeRO-3 can be told beyond sharding weights: replicas within groups of ranks, prefetching, and int8."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from services.trainer.compute.sharding.quantized import BLOCK, dequantize, quantize
from tests.component.engine.data import ADAM
from tests.component.engine.process import play
from tests.component.engine.ranks.sharding import FULL_ADAM, RANKS, ROWS, WAYS, Gather, Report, Reports
from tests.component.engine.reference import ReferenceModel, values

pytestmark = pytest.mark.heavy

GATHERED = 10_000
"""Elements of a weight that is held whole."""


@pytest.fixture(scope="module")
def played(untied: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Report]]:
    out = tmp_path_factory.mktemp("out")
    reports = play("ranks.sharding", untied, out, Reports, RANKS, stage=3)
    return {name: [each.ways[name] for each in reports] for name in WAYS}


@pytest.fixture(scope="module")
def rounded(untied: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with the weights that were gathered as int8, as they come back."""
    path = tmp_path_factory.mktemp("rounded")
    for file in untied.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    weights = load_file(untied / "model.safetensors")
    changed = 0
    for name, weight in weights.items():
        if weight.numel() > GATHERED:
            assert weight.numel() % (RANKS * BLOCK) == 0
            weights[name] = dequantize(*quantize(weight), weight.dtype).contiguous()
            changed += 1
    assert changed > 10
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.mark.parametrize("name", WAYS)
def test_an_adapter_trains_as_on_a_plain_pytorch_loop_over_the_same_weights(
    played: dict[str, list[Report]], name: str, untied: Path, rounded: Path
) -> None:
    report = played[name][0]
    assert report.initial is not None and report.trained is not None
    model = ReferenceModel(rounded if "int8" in name else untied, report.initial.adapter)
    for results, step in zip(report.results, report.steps, strict=True):
        for row, result in zip(ROWS, results, strict=True):
            expected = model.logprobs(row).detach().numpy()
            np.testing.assert_allclose(values(result.outputs["logprobs"]), expected, rtol=0, atol=2e-5)
        assert step["grad_norm"] == pytest.approx(model.step(ROWS, "cross_entropy", ADAM), rel=1e-4)
    model.assert_same_adapter(report.trained.adapter)


@pytest.mark.parametrize("name", WAYS)
def test_models_that_train_all_weights_train_as_on_a_plain_pytorch_loop(
    played: dict[str, list[Report]], name: str, untied: Path
) -> None:
    report = played[name][0]
    for number, model_id in enumerate(("one", "two")):
        model = ReferenceModel(untied, train_all=True)
        for results, step in list(zip(report.full_results, report.full_steps, strict=True))[3 * number :][:3]:
            for row, result in zip(ROWS, results, strict=True):
                expected = model.logprobs(row).detach().numpy()
                np.testing.assert_allclose(values(result.outputs["logprobs"]), expected, rtol=1e-5, atol=5e-5)
            norm = model.step(ROWS, "cross_entropy", FULL_ADAM)
            assert step["grad_norm"] == pytest.approx(norm, rel=1e-3)
        model.assert_same_adapter(report.full[model_id].adapter, tolerance=1e-4)


def test_int8_changes_log_probabilities_by_little(played: dict[str, list[Report]]) -> None:
    plain, rounded = (played[name][0].results[0] for name in ("nothing", "int8"))
    for one, other in zip(plain, rounded, strict=True):
        difference = np.abs(values(one.outputs["logprobs"]) - values(other.outputs["logprobs"])).max()
        assert 0 < difference < 0.05


def test_with_replicas_ranks_gather_from_their_own_group(played: dict[str, list[Report]]) -> None:
    assert _ranks(played["nothing"][0].gathers) == {4}
    for name in ("replicas", "int8 replicas"):
        for report in played[name]:
            assert _ranks(report.gathers) == {2}
            # A step makes weights anew, and the first to need them asks all ranks.
            assert _ranks(report.full_gathers["after a step"]) == {4}
            assert _ranks(report.full_gathers["again"]) == {2}


def _ranks(gathers: list[Gather]) -> set[int]:
    return {gather.ranks for gather in gathers}


def test_prefetching_puts_weights_of_several_modules_into_one_collective(
    played: dict[str, list[Report]],
) -> None:
    some, none = (played[name][0].gathers for name in ("nothing", "no prefetch"))
    assert 0 < len(some) < len(none)


def test_int8_is_what_is_gathered_and_held(played: dict[str, list[Report]], untied: Path) -> None:
    plain, rounded, replicas, both = (
        played[name][0] for name in ("nothing", "int8", "replicas", "int8 replicas")
    )
    assert {gather.dtype for gather in plain.gathers} == {"torch.float32"}
    # Each weight, and behind it a float32 for each block.
    heard = rounded.gathers
    behind = [other for one, other in itertools.pairwise(heard) if one.dtype == "torch.int8"]
    int8 = [gather for gather in heard if gather.dtype == "torch.int8"]
    assert 10 < len(int8) == len(behind)
    assert [4 * gather.bytes // BLOCK for gather in int8] == [gather.bytes for gather in behind]
    assert sum(gather.bytes for gather in heard) < 0.35 * sum(gather.bytes for gather in plain.gathers)
    # What is gathered for each use, and the little that ranks hold whole beside their part.
    sizes = [weight.numel() for weight in load_file(untied / "model.safetensors").values()]
    large = sum(size for size in sizes if size > GATHERED)
    small = sum(sizes) - large
    assert plain.weights == pytest.approx(4 * (large + small) / RANKS, rel=1e-3)
    assert rounded.weights == pytest.approx(((1 + 4 / BLOCK) * large + 4 * small) / RANKS, rel=1e-3)
    # A quarter of the weights, and half of them for the group.
    assert replicas.weights == pytest.approx(3 * plain.weights, rel=1e-3)
    assert both.weights == pytest.approx(3 * rounded.weights, rel=1e-3)
