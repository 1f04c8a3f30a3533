"""Recipes that ask at length, and ask models that they name: they have a cluster of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.cluster.conftest import start_cluster, stop_cluster
from tests.ecosystem.conftest import Table
from tests.ecosystem.guesser import LONG_LESSONS, SENTENCES, make_guesser
from tests.ecosystem.recipes import POLICY, RENDERER, TEACHER, Kitchen, lay_out_tokenizer, trained

# The first waits for the model's schooling and for the cluster.
pytestmark = [pytest.mark.timeout(1800), pytest.mark.long]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kitchen]:
    """A directory for recipes, and a cluster with a model that has learned long prompts, by both names."""
    model = make_guesser(
        tmp_path_factory.mktemp("model") / "reader", steps=150, lessons=LONG_LESSONS, shown=(96, 352, 4000)
    )
    directory = tmp_path_factory.mktemp("study")
    for name in (POLICY, TEACHER):
        lay_out_tokenizer(directory / name, model)
    options = ("--model", f"{TEACHER}={model}", "--stable-reinforce-as", "ppo")
    running = start_cluster(tmp_path_factory.mktemp("reading"), model, *options, name=POLICY, timeout=600)
    yield Kitchen(directory, running)
    left = stop_cluster(running)
    assert left == [], f"processes left behind: {left}"


def test_a_prompt_is_distilled_from_what_a_teacher_answers(study: Kitchen, table: Table) -> None:
    sentences = study.directory / "tinker_cookbook" / "example_data" / "multilingual.txt"
    sentences.parent.mkdir(parents=True)
    sentences.write_text("".join(f"{sentence}\n" for _, sentence in SENTENCES))
    run = study.cook("prompt_distillation.create_data", "output_file=made/talks.jsonl", logs=False)
    made = (study.directory / "made" / "talks.jsonl").read_text().splitlines()
    labels = {label for label, _ in SENTENCES}
    talks = [json.loads(line)["messages"] for line in made]
    assert talks
    # The prompt is gone, the sentence and what the teacher said of it are left.
    assert {ask["content"] for ask, _ in talks} <= {sentence for _, sentence in SENTENCES}
    assert {answer["content"] for _, answer in talks} <= labels, talks
    table.add(
        "prompt_distillation.create_data", run, 1, f"{len(talks)} of {len(SENTENCES)} sentences got an answer"
    )


def test_twenty_questions_are_asked_and_some_games_are_won(study: Kitchen, table: Table) -> None:
    # Who answers is the base model of this name, whoever asks.
    run = study.cook(
        "multiplayer_rl.twenty_questions.train",
        f"model_name={POLICY}",
        RENDERER,
        "batch_size=2",
        "group_size=8",
        "learning_rate=2e-3",
        "max_steps=2",
        "eval_every=0",
        seconds=600,
    )
    turns = run.series("env/all/turns_per_episode")
    assert 1 < max(turns) <= 20, turns
    moved = f"{trained(run)}; {turns[0]:.1f} to {turns[-1]:.1f} turns a game"
    table.add("multiplayer_rl.twenty_questions", run, 2, moved)
