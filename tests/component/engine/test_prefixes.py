"""Datums of one operation that begin alike are computed once for what they share, and come to the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from services.trainer.compute.data import PassOp, Row, RowResult
from services.trainer.compute.engine import Engine
from services.trainer.compute.full.model import FullModel
from services.trainer.order.prefixes import prefix_tree
from tests.component.engine.data import (
    ADAM,
    CRITIC,
    LORA,
    NO_CLIP,
    VOCAB,
    Placed,
    ce_row,
    critic_row,
    is_row,
    op,
    trained_model,
    with_input,
    work,
)
from tests.component.engine.engines import engine_of
from tests.component.engine.reference import ReferenceModel, values
from tests.unit.trainer.compute.architectures import HYBRID, config_of, random_model

pytestmark = pytest.mark.heavy

Make = Callable[[int, int], Row]

# A row's length, and how much of it is of the trunk, of a branch, and its own.
NESTED = [(60, 32, 0), (85, 64, 16), (64, 64, 0), (90, 64, 16), (40, 39, 0), (64, 64, 0), (20, 0, 0)]


def rows_of(make: Make, seed: int = 0) -> list[Row]:
    """Rows that begin alike at several depths, two that are equal, and one of its own; what a loss takes of
    them differs."""
    rng = np.random.default_rng(1000 + seed)
    trunk, branch = rng.integers(0, VOCAB, 64), rng.integers(0, VOCAB, 16)
    rows = []
    for number, (length, stem, more) in enumerate(NESTED):
        row = make(100 * seed + number, length)
        begin = np.concatenate([trunk[:stem], branch[:more]]).astype("<i4").tobytes()
        rows.append(msgspec.structs.replace(row, tokens=begin + row.tokens[len(begin) :]))
    return rows


def several_targets(seed: int, length: int) -> Row:
    return ce_row(seed, length, columns=1 + seed % 3)


def masked(seed: int, length: int) -> Row:
    sampled = (np.arange(length) >= length - 8).astype(np.float32)
    return with_input(is_row(seed, length), "sequence_ratio_mask", sampled)


LOSSES: dict[str, tuple[str, dict[str, float], Make]] = {
    "cross_entropy": ("cross_entropy", {}, ce_row),
    "cross_entropy, several targets": ("cross_entropy", {}, several_targets),
    "importance_sampling": ("importance_sampling", {}, is_row),
    "ppo": ("ppo", {"clip_high_threshold": 1.1}, is_row),
    "cispo": ("cispo", {"clip_high_threshold": 1.2}, is_row),
    "dro": ("dro", {"beta": 0.5}, is_row),
    "gspo": ("gspo", {}, masked),
    "ppo_critic": ("ppo_critic", {"value_clip": 0.2}, critic_row),
}


def placed(name: str, model_id: str = "m", seed: int = 0) -> tuple[PassOp, list[Row]]:
    loss_fn, config, make = LOSSES[name]
    return PassOp(model_id, 1, loss_fn, config), rows_of(make, seed)


def outcome(
    engine: Engine, *work_of: Placed, cut: Any = None
) -> tuple[list[RowResult], dict[str, np.ndarray]]:
    """Results, and each model's gradient."""
    for operation, _ in work_of:
        lora = CRITIC if operation.loss_fn == "ppo_critic" else LORA
        trained_model(engine, operation.model_id, lora, seed=len(operation.model_id))
    results = engine.run_pass(work(*work_of, cut=cut))
    gradients = {}
    for operation, _ in work_of:
        tenant = engine._tenants[operation.model_id]
        if not operation.forward_only:
            gradients[operation.model_id] = tenant.gradient(1)[0].numpy().copy()  # type: ignore[union-attr]
        engine.drop_model(operation.model_id)
    return results, gradients


def assert_same(
    found: tuple[list[RowResult], dict[str, np.ndarray]],
    expected: tuple[list[RowResult], dict[str, np.ndarray]],
) -> None:
    assert len(found[0]) == len(expected[0])
    for ours, theirs in zip(found[0], expected[0], strict=True):
        assert ours.failure is None
        assert (ours.op, ours.index) == (theirs.op, theirs.index)
        for name, array in theirs.outputs.items():
            assert ours.outputs[name].shape == array.shape
            np.testing.assert_allclose(values(ours.outputs[name]), values(array), rtol=0, atol=1e-5)
        assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-4, abs=1e-4)
    assert found[1].keys() == expected[1].keys()
    for model_id, gradient in expected[1].items():
        assert np.abs(gradient).max() > 1e-3
        scale = float(np.abs(gradient).max())
        np.testing.assert_allclose(found[1][model_id], gradient, rtol=0, atol=1e-5 * max(1.0, scale))


@pytest.fixture
def computed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each micro-batch that the base model was given."""
    sizes: list[int] = []
    score = engine._base.score

    def counted(tokens: torch.Tensor, *rest: Any) -> Any:
        sizes.append(tokens.shape[1])
        return score(tokens, *rest)

    monkeypatch.setattr(engine._base, "score", counted)
    return sizes


def apart(engine: Engine, monkeypatch: pytest.MonkeyPatch, *work_of: Placed, cut: Any = None) -> Any:
    """The outcome without sharing."""
    with monkeypatch.context() as without:
        without.setattr(engine._rounds, "shares_prefixes", False)
        return outcome(engine, *work_of, cut=cut)


def sent(*work_of: Placed) -> int:
    return sum(row.length for _, rows in work_of for row in rows)


def tree_tokens(rows: Sequence[Row]) -> int:
    return prefix_tree([row.tokens for row in rows]).tokens


@pytest.mark.parametrize("name", LOSSES)
def test_sharing_changes_no_result_and_no_gradient(
    engine: Engine, computed: list[int], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    work_of = placed(name)
    assert_same(outcome(engine, work_of), apart(engine, monkeypatch, work_of))
    assert computed == [tree_tokens(work_of[1]), sent(work_of)]
    assert computed[0] < 0.6 * computed[1]


@pytest.mark.parametrize("loss_fn", ["cross_entropy", "importance_sampling"])
def test_training_on_shared_prefixes_equals_a_plain_pytorch_loop(
    engine: Engine, directory: Path, loss_fn: str
) -> None:
    state = trained_model(engine, "m")
    reference = ReferenceModel(directory, state.adapter)
    for step in range(2):
        rows = rows_of(LOSSES[loss_fn][2], seed=step)
        results = engine.run_pass(work((op("m", step + 1, loss_fn), rows)))
        for row, result in zip(rows, results, strict=True):
            expected = reference.logprobs(row).detach().numpy()
            np.testing.assert_allclose(values(result.outputs["logprobs"]), expected, rtol=1e-5, atol=5e-5)
        norm = reference.step(rows, loss_fn, ADAM)
        assert engine.optim_step("m", ADAM)["grad_norm"] == pytest.approx(norm, rel=1e-4)
        reference.assert_same_adapter(engine.state("m").adapter)


def everything() -> list[Placed]:
    """Two models with the same tokens, another loss, a critic, rows that share nothing, and one that only
    runs forward."""
    return [
        placed("importance_sampling", "a"),
        placed("importance_sampling", "aa"),
        placed("gspo", "aaa", seed=3),
        placed("ppo_critic", "v"),
        (op("n"), [ce_row(5, 30), ce_row(6, 12)]),
        (op("f", forward_only=True), rows_of(ce_row, seed=4)),
    ]


def test_tenants_in_one_micro_batch_share_with_nobody_but_themselves(
    engine: Engine, computed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    work_of = everything()
    assert_same(outcome(engine, *work_of), apart(engine, monkeypatch, *work_of))
    trained = sum(tree_tokens(rows) for operation, rows in work_of if not operation.forward_only)
    assert computed[:2] == [tree_tokens(work_of[-1][1]), trained]


def test_how_an_operation_is_cut_changes_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    work_of = placed("ppo")
    cut = [[(0, 3), (0, 0)], [(0, 5), (0, 1), (0, 6)], [(0, 2), (0, 4)]]
    assert_same(outcome(engine, work_of, cut=cut), apart(engine, monkeypatch, work_of))


def test_the_same_batch_comes_to_the_same_bits(engine: Engine) -> None:
    work_of = everything()
    one, other = outcome(engine, *work_of), outcome(engine, *work_of)
    assert one[0] == other[0]
    assert all(np.array_equal(one[1][model_id], other[1][model_id]) for model_id in one[1])


def test_checkpointed_activations_change_no_number(engine: Engine, directory: Path) -> None:
    checkpointed = engine_of(directory, activation_checkpointing=True)
    found, expected = outcome(checkpointed, *everything()), outcome(engine, *everything())
    assert found[0] == expected[0]
    for model_id, gradient in expected[1].items():
        assert np.array_equal(found[1][model_id], gradient)


@pytest.mark.parametrize("where", ["score", "backward"])
def test_each_half_of_a_batch_that_does_not_fit_has_its_prefix(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    work_of = [placed("importance_sampling", "a"), placed("ppo_critic", "v")]
    expected = apart(engine, monkeypatch, *work_of)
    score, backward, sizes = engine._base.score, engine._base.backward, []

    def watched(tokens: torch.Tensor, *rest: Any) -> Any:
        sizes.append(tokens.shape[1])
        if where == "score" and sizes[-1] > 150:
            raise torch.OutOfMemoryError("no memory")
        return score(tokens, *rest)

    def limited(loss: torch.Tensor) -> None:
        backward(loss)
        if where == "backward" and sizes[-1] > 150:
            raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(engine._base, "score", watched)
    monkeypatch.setattr(engine._base, "backward", limited)
    assert_same(outcome(engine, *work_of), expected)
    assert max(sizes) > 150
    fitted = [size for size in sizes if size <= 150]
    assert len(fitted) >= 4
    # Sharing went on in the parts.
    assert sum(fitted) < sent(*work_of)


def test_a_full_model_shares_prefixes_too(
    engine: Engine, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.create_model("full", None)
    full = engine._tenants["full"]
    assert isinstance(full, FullModel)
    score, sizes = full.score, []

    def counted(tokens: torch.Tensor, *rest: Any) -> Any:
        sizes.append(tokens.shape[1])
        return score(tokens, *rest)

    monkeypatch.setattr(full, "score", counted)
    reference = ReferenceModel(directory, train_all=True)
    rows = rows_of(several_targets)
    results = engine.run_pass(work((op("full"), rows)))
    assert sizes == [tree_tokens(rows)]
    for row, result in zip(rows, results, strict=True):
        expected = reference.logprobs(row).detach().numpy()
        np.testing.assert_allclose(values(result.outputs["logprobs"]), expected, rtol=0, atol=1e-5)
    adam = msgspec.structs.replace(NO_CLIP, learning_rate=0.05)
    norm = reference.step(rows, "cross_entropy", adam)
    assert engine.optim_step("full", adam)["grad_norm"] == pytest.approx(norm, rel=1e-4)
    reference.assert_same_adapter(engine.state("full", optimizer=False).adapter)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("name", HYBRID)
def test_what_a_state_goes_on_from_is_computed_once_too(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**HYBRID[name], "vocab_size": VOCAB, "max_position_embeddings": 128}
    random_model(config_of(name, settings), "eager").save_pretrained(tmp_path)
    engine = engine_of(tmp_path)
    assert engine.shares_prefixes
    work_of = everything()
    found, expected = outcome(engine, *work_of), apart(engine, monkeypatch, *work_of)
    assert_same(found, expected)
    checkpointed = outcome(engine_of(tmp_path, activation_checkpointing=True), *work_of)
    assert_same(checkpointed, expected)
