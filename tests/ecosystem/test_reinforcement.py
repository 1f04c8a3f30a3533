"""The cookbook's recipes of reinforcement learning run as they are: rewards differ, and training moves them.

So do those that learn from a teacher's log-probabilities of what they say.
"""

from __future__ import annotations

import random
from pathlib import Path
from statistics import mean

import pytest

from tests.ecosystem import data
from tests.ecosystem.conftest import Table
from tests.ecosystem.recipes import POLICY, RENDERER, Kitchen, lay_out_tokenizer, trained

# The first test of a session waits for the cluster.
pytestmark = pytest.mark.timeout(1800)


def test_rl_loop_takes_its_steps_and_earns(kitchen: Kitchen, table: Table) -> None:
    """That it earns more takes more steps than these: in five of 64 answers the first may be the luckiest."""
    run = kitchen.cook(
        "rl_loop",
        f"model_name={POLICY}",
        "batch_size=4",
        "group_size=16",
        "learning_rate=5e-3",
        "max_tokens=24",
        "max_steps=5",
        "save_every=2",
    )
    seen = run.series("reward/total")
    assert len(seen) == 5 and max(seen) > 0, seen
    assert [row["name"] for row in run.checkpoints()] == ["000002", "000004", "final"]
    table.add("rl_loop", run, 5, f"reward/total {seen[0]:.2f} to {seen[-1]:.2f}; 3 checkpoints")


@pytest.mark.long
def test_rl_loop_goes_on_earning_more(kitchen: Kitchen, table: Table, tmp_path: Path) -> None:
    place = Kitchen(tmp_path, kitchen.cluster)
    lay_out_tokenizer(tmp_path / POLICY, kitchen.cluster.model_dir)
    data.write_problems(tmp_path, random.Random(2), train=240, test=4)
    run = place.cook(
        "rl_loop",
        f"model_name={POLICY}",
        "batch_size=4",
        "group_size=16",
        "learning_rate=2e-3",
        "max_tokens=24",
        "save_every=20",
        seconds=900,
    )
    table.long_run = run.series("reward/total")
    first, last = mean(table.long_run[:10]), mean(table.long_run[-10:])
    assert len(table.long_run) == 60
    assert last > first + 0.3, table.long_run
    table.add("rl_loop, long", run, 60, f"reward/total of ten steps {first:.2f} to {last:.2f}")


@pytest.mark.long
def test_rl_basic_earns_more(kitchen: Kitchen, table: Table) -> None:
    # Its batches are of 128 groups; the builder of its data is named anew for smaller ones.
    run = kitchen.cook(
        "rl_basic",
        f"model_name={POLICY}",
        "dataset_builder=Gsm8kDatasetBuilder",
        f"dataset_builder.model_name_for_tokenizer={POLICY}",
        "dataset_builder.renderer_name=qwen3_5",
        "dataset_builder.batch_size=4",
        "dataset_builder.group_size=16",
        "learning_rate=5e-3",
        "max_tokens=24",
        "max_steps=4",
    )
    moved = trained(run)
    rewards = run.series("env/all/reward/total")
    assert max(rewards[1:]) > rewards[0], rewards
    table.add("rl_basic", run, 4, moved)


MATH = (
    f"model_name={POLICY}",
    RENDERER,
    "env=arithmetic",
    "groups_per_batch=8",
    "group_size=4",
    "learning_rate=2e-3",
)


@pytest.mark.long
def test_math_rl_trains_on_arithmetic(kitchen: Kitchen, table: Table) -> None:
    run = kitchen.cook(
        "math_rl.train", *MATH, "loss_fn=importance_sampling", "max_steps=4", "compute_post_kl=true"
    )
    moved = trained(run)
    rewards = run.series("env/all/reward/total")
    assert max(rewards[1:]) > rewards[0], rewards
    table.add("math_rl", run, 4, moved)


@pytest.mark.long
def test_math_rl_trains_while_it_samples(kitchen: Kitchen, table: Table) -> None:
    run = kitchen.cook("math_rl.train", *MATH, "max_steps=4", "max_steps_off_policy=2")
    table.add("math_rl, asynchronous", run, 4, trained(run, on_policy=False))


@pytest.mark.long
def test_math_rl_trains_on_minibatches_as_they_come(kitchen: Kitchen, table: Table) -> None:
    run = kitchen.cook(
        "math_rl.train",
        *MATH,
        "loss_fn=importance_sampling",
        "max_steps=3",
        "stream_minibatch_config.groups_per_batch=8",
        "stream_minibatch_config.num_minibatches=2",
    )
    table.add("math_rl, streaming", run, 3, trained(run))


@pytest.mark.long
def test_shorter_answers_win(kitchen: Kitchen, table: Table) -> None:
    run = kitchen.cook(
        "preference.shorter.train",
        f"model_name={POLICY}",
        RENDERER,
        "batch_size=4",
        "group_size=4",
        "learning_rate=2e-3",
        "max_steps=3",
        "eval_every=0",
    )
    lengths = run.series("env/all/ac_tokens_per_turn")
    assert min(lengths[1:]) < lengths[0], lengths
    moved = f"{trained(run)}; {lengths[0]:.1f} to {lengths[-1]:.1f} tokens an answer"
    table.add("preference.shorter", run, 3, moved)


@pytest.mark.long
def test_guess_number_plays_turns(kitchen: Kitchen, table: Table) -> None:
    run = kitchen.cook(
        "multiplayer_rl.guess_number.train",
        f"model_name={POLICY}",
        RENDERER,
        "batch_size=2",
        "group_size=4",
        "learning_rate=2e-3",
        "max_tokens=16",
        "max_steps=2",
        "eval_every=0",
    )
    table.add("multiplayer_rl.guess_number", run, 2, trained(run))


@pytest.mark.long
def test_a_teacher_is_imitated(kitchen: Kitchen, table: Table) -> None:
    taught = kitchen.cook(
        "chat_sl.train",
        f"model_name={POLICY}",
        RENDERER,
        "dataset=answers.jsonl",
        "batch_size=16",
        "learning_rate=5e-3",
        # One batch an epoch. A teacher of fewer is so near that what 32 answers say of it is chance.
        "num_epochs=4",
        "eval_every=0",
    )
    teacher = taught.checkpoints()[-1]["sampler_path"]
    run = kitchen.cook(
        "distillation.on_policy_distillation",
        f"model_name={POLICY}",
        RENDERER,
        f"teacher_model={POLICY}",
        f"teacher_checkpoint={teacher}",
        "groups_per_batch=8",
        "learning_rate=5e-3",
        "max_tokens=24",
        "max_steps=4",
        "eval_every=0",
    )
    kl = run.series("teacher_kl")
    assert min(kl[1:]) < kl[0], kl
    table.add("distillation.on_policy_distillation", run, 4, f"teacher_kl {kl[0]:.3f} to {kl[-1]:.3f}")


@pytest.mark.long
def test_sdft_learns_from_its_own_golden_answers(kitchen: Kitchen, table: Table) -> None:
    run = kitchen.cook(
        "sdft.train",
        f"model_name={POLICY}",
        RENDERER,
        "groups_per_batch=4",
        "learning_rate=2e-3",
        "max_tokens=24",
        "max_steps=3",
        "eval_every=0",
    )
    norms = run.series("grad_norm")
    assert len(norms) == 3
    assert min(norms) > 0
    entropy = run.series("sdft/mean_teacher_entropy")
    assert min(entropy) > 0
    table.add(
        "sdft", run, 3, f"gradients of norm {min(norms):.2g} to {max(norms):.2g} towards 20 tokens a place"
    )


@pytest.mark.long
def test_rubric_has_a_model_grade(kitchen: Kitchen, table: Table) -> None:
    from tinker_cookbook.recipes.rubric.generate_data import generate_dataset

    generate_dataset(16, 4, 0, str(kitchen.directory))
    run = kitchen.cook(
        "rubric.train",
        f"model_name={POLICY}",
        f"grader_llm_name={POLICY}",
        "train_jsonl_path=example_rubric_train.jsonl",
        "test_jsonl_path=example_rubric_test.jsonl",
        "groups_per_batch=4",
        "learning_rate=2e-3",
        "max_steps=2",
        "eval_every=0",
    )
    table.add("rubric", run, 2, trained(run))
