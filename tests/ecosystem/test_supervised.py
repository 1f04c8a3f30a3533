"""The cookbook's recipes of supervised learning run as they are, and their losses fall."""

from __future__ import annotations

import time

import pytest

from tests.ecosystem.conftest import Table
from tests.ecosystem.recipes import POLICY, RENDERER, Kitchen, Run

# The first test of a session waits for the cluster.
pytestmark = pytest.mark.timeout(1800)


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
def test_sl_loop_goes_on_from_its_checkpoint_after_its_process_was_killed(
    kitchen: Kitchen, table: Table
) -> None:
    options = (f"model_name={POLICY}", "batch_size=2", "max_steps=16", "learning_rate=1e-3", "save_every=2")
    log = kitchen.new_log()
    process = kitchen.start("sl_loop", *options, f"log_path={log}")
    deadline = time.monotonic() + 120
    checkpoints = log / "checkpoints.jsonl"
    while not checkpoints.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    output, _ = process.communicate()
    assert checkpoints.exists(), output[-4000:]

    run = kitchen.cook("sl_loop", *options, log=log)
    steps = [row["step"] for row in run.metrics()]
    began = next(
        int(line.rsplit(" ", 1)[1]) for line in run.output.splitlines() if "Resuming from batch" in line
    )
    assert began >= 2
    assert began % 2 == 0
    assert steps[-(16 - began) :] == list(range(began, 16)), steps
    table.add(
        "sl_loop, killed", run, 16 - began, f"killed and started again, it went on from step {began} to 16"
    )


@pytest.mark.long
def test_sl_basic_learns(kitchen: Kitchen, table: Table) -> None:
    # Its batches are of 128, which no option changes.
    run = kitchen.cook(
        "sl_basic", f"model_name={POLICY}", "learning_rate=2e-3", "max_steps=3", "eval_every=0"
    )
    table.add("sl_basic", run, 3, falls(run))


@pytest.mark.long
def test_chat_sl_learns_from_a_file_and_keeps_one_rolling_checkpoint_at_a_time(
    kitchen: Kitchen, table: Table
) -> None:
    run = kitchen.cook(
        "chat_sl.train",
        f"model_name={POLICY}",
        "dataset=talks.jsonl",
        "batch_size=8",
        "learning_rate=2e-3",
        "max_steps=5",
        "save_every=2",
        "rolling_save_every=1",
        "eval_every=2",
    )
    moved = falls(run)
    model_id = run.checkpoints()[-1]["state_path"].split("/")[2]
    kept = kitchen.cluster.rest_client().list_checkpoints(model_id).result().checkpoints
    states = sorted(found.checkpoint_id for found in kept if found.checkpoint_type == "training")
    # Rolling checkpoints are deleted when the next comes; those of every second step stay.
    assert states == ["weights/000002", "weights/000004", "weights/final"]
    table.add("chat_sl", run, 5, f"{moved}; of a rolling checkpoint every step, none is left")


@pytest.mark.long
def test_off_policy_distillation_learns_reasoning(kitchen: Kitchen, table: Table) -> None:
    run = kitchen.cook(
        "distillation.off_policy_reasoning",
        f"model_name={POLICY}",
        "batch_size=8",
        "max_prompts=40",
        "buffer_size=40",
        "max_steps=4",
    )
    table.add("distillation.off_policy_reasoning", run, 4, falls(run))


@pytest.mark.long
def test_prompt_distillation_learns_answers_without_the_prompt(kitchen: Kitchen, table: Table) -> None:
    run = kitchen.cook(
        "prompt_distillation.train",
        f"model_name={POLICY}",
        RENDERER,
        "file_path=talks.jsonl",
        "batch_size=8",
        "learning_rate=2e-3",
        "max_steps=3",
        "eval_every=0",
    )
    table.add("prompt_distillation.train", run, 3, falls(run))


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
