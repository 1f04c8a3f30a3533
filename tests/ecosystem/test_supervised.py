"""The cookbook's recipes of supervised learning run as they are, and their losses fall."""

from __future__ import annotations

import pytest

from tests.ecosystem.conftest import Table
from tests.ecosystem.recipes import POLICY, RENDERER, Kitchen, Run

# The first test of a session waits for the cluster.
pytestmark = pytest.mark.timeout(1200)


def falls(run: Run, name: str = "train_mean_nll") -> str:
    """What the table says of a loss, which must have fallen."""
    losses = run.series(name)
    assert len(losses) > 1
    assert losses[-1] < losses[0], losses
    return f"{name} {losses[0]:.2f} to {losses[-1]:.2f}"


def test_sl_loop_learns_and_saves(kitchen: Kitchen, table: Table) -> None:
    options = (f"model_name={POLICY}", "batch_size=8", "max_steps=5", "learning_rate=2e-3", "save_every=2")
    run = kitchen.cook("sl_loop", *options)
    moved = falls(run)
    assert [row["name"] for row in run.checkpoints()] == ["000002", "000004", "final"]
    table.add("sl_loop", run, 5, f"{moved}; 3 checkpoints")


@pytest.mark.long
def test_decisions_learn_to_forecast(kitchen: Kitchen, table: Table) -> None:
    run = kitchen.cook(
        "decisions.forecasting",
        f"model_name={POLICY}",
        RENDERER,
        "data_path=markets.csv",
        "batch_size=4",
        "learning_rate=1e-3",
        "max_steps=4",
    )
    table.add("decisions.forecasting", run, 4, falls(run, "train/loss"))


@pytest.mark.long
def test_dpo_prefers_what_was_chosen(kitchen: Kitchen, table: Table) -> None:
    run = kitchen.cook(
        "preference.dpo.train",
        f"model_name={POLICY}",
        "batch_size=8",
        "learning_rate=1e-3",
        "max_steps=4",
        "max_length=512",
    )
    table.add("preference.dpo", run, 4, falls(run, "dpo_loss"))
