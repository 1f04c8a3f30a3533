"""What the demo shows, part by part, and whether it came out as it should."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from pathlib import Path

import tinker

from services.launcher import default_model

from . import cluster, display, plot, rl, sft
from .pace import SHARES, Pace, words

RANK = 8
# Below this mean reward at the first step there is too little to learn from.
LEARNABLE = 0.05
TITLES = {
    "model": "The model",
    "cluster": "The cluster: Redis, gateway, DeepSpeed trainer, vLLM sampler",
    "sft": f"Supervised fine-tuning: LoRA rank {RANK}, {len(sft.LESSONS)} lessons",
    "checkpoint": "Checkpoint: save, resume in a new model, train both on",
    "rl": f"Reinforcement learning: {rl.PROBLEMS} sums x {rl.GROUP} samples a step, importance_sampling",
}

NEXT = (
    "Next: `.venv/bin/tinsmith up` serves a model to loops of your own; README.md has one of fifteen lines."
)


class Parts:
    """Announces parts and says how much time is left."""

    def __init__(self) -> None:
        self._pace = Pace()
        self._current = ""

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """One part, from its title on."""
        number = list(SHARES).index(name) + 1
        self._current = name
        display.heading(f"{number} of {len(SHARES)}  {TITLES[name]}  ({words(self._pace.left(name))})")
        started = time.monotonic()
        yield
        self._pace.finish(name, time.monotonic() - started)

    def left(self, done: float) -> str:
        """Time until the end of the demo, when so much of the current part, 0 to 1, is done."""
        return words(self._pace.left(self._current, done))


def tell(model: str | None, data_dir: Path, cache: Path) -> int:
    """Runs everything and returns the exit code.

    Args:
        model: path or hub id; None = the default model, converted into `cache` once.
    """
    started, parts = time.monotonic(), Parts()
    name = base_model_name(model)
    try:
        with parts.part("model"), display.waiting("Preparing the model"):
            model = model or default_model.prepare(cache)
        display.line(f"{name} from {model}")
        with parts.part("cluster"), display.waiting("Starting") as show:
            running = cluster.start(name, model, data_dir, show)
        with running:
            problems = demonstrate(running.endpoint, name, data_dir, parts)
    except cluster.ClusterFailed as failure:
        display.line(str(failure))
        return 1
    except KeyboardInterrupt:
        display.line("Interrupted; the cluster has stopped.")
        return 130
    for problem in problems:
        display.line(f"FAILED: {problem}")
    display.line(f"\n{'Done' if not problems else 'Failed'} after {time.monotonic() - started:.0f} s.")
    if not problems:
        display.line(NEXT)
    return 1 if problems else 0


def base_model_name(model: str | None) -> str:
    """What the SDK calls the model: a hub id as it is, a directory by its last part."""
    if model is None:
        return default_model.NAME
    return Path(model).resolve().name if Path(model).is_dir() else model


def demonstrate(endpoint: cluster.Endpoint, name: str, data_dir: Path, parts: Parts) -> list[str]:
    """The demo proper; returns what did not come out as it should."""
    display.line(f"Cluster at {endpoint.base_url}; its output: {data_dir / 'up.log'}")
    with tinker.ServiceClient(base_url=endpoint.base_url, api_key=endpoint.api_key) as service:
        with parts.part("sft"):
            training, losses = supervised_part(service, name, parts)
        with parts.part("checkpoint"):
            resumed = checkpoint_part(service, training)
        with parts.part("rl"):
            rewards = reinforced_part(service, name, parts)
    figure = data_dir / "curves.png"
    plot.save_png(figure, losses, rewards, name)
    display.line(f"\nCurves: {figure}")
    return judge(losses, resumed, rewards)


def supervised_part(
    service: tinker.ServiceClient, name: str, parts: Parts
) -> tuple[tinker.TrainingClient, list[float]]:
    """Fine-tunes on the lessons; returns the trained model and the losses."""
    with display.waiting("The model answers before it learns"):
        training = service.create_lora_training_client(name, rank=RANK, seed=0).result()
        tokenizer = training.get_tokenizer()
        lessons = sft.lessons(tokenizer)
        before = sft.answers(service.create_sampling_client(base_model=name).result(), tokenizer)
    with display.steps("step", sft.STEPS, parts.left) as report:
        losses = sft.train(training, lessons, lambda loss: report(f"loss {loss:.3f}"))
    display.line("loss per answer token, by step\n" + plot.bars(losses))
    with display.waiting("The model answers what it was not taught"):
        after = sft.answers(training.save_weights_and_get_sampling_client().result(), tokenizer)
    display.table(
        ("question (not among the lessons)", "before", "after"),
        list(zip(sft.EXAM, before, after, strict=True)),
    )
    return training, losses


def checkpoint_part(
    service: tinker.ServiceClient, training: tinker.TrainingClient
) -> list[tuple[float, float]]:
    """Resumes from a checkpoint; returns the losses of the original and of the resumed model."""
    with display.waiting("Saving, resuming, and training both on"):
        lessons = sft.lessons(training.get_tokenizer())
        path, resumed = sft.resume(service, training, lessons[: sft.BATCH])
    display.line(path)
    rows = [
        (when, f"{a:.6f}", f"{b:.6f}")
        for when, (a, b) in zip(("as saved", "a step later"), resumed, strict=True)
    ]
    display.table(("loss", "original", "resumed"), rows)
    return resumed


def reinforced_part(service: tinker.ServiceClient, name: str, parts: Parts) -> list[float]:
    """Trains a second, fresh adapter beside the first by reward; returns the mean rewards."""
    training = service.create_lora_training_client(name, rank=RANK, seed=0).result()
    rounds: list[list[rl.Attempt]] = []
    with display.steps("step", rl.STEPS, parts.left) as report:

        def show(reward: float, attempts: list[rl.Attempt]) -> None:
            rounds.append(attempts)
            report(f"reward {reward:.2f}  e.g. {attempts[0].problem} ={attempts[0].text!r}")

        rewards = rl.train(training, training.get_tokenizer(), show)
    display.line("mean reward, by step\n" + plot.bars(rewards))
    if rewards[0] < LEARNABLE:
        display.line("Hardly any answer earned a reward at first: these sums are beyond this model.")
    said = [
        [f"{a.problem} ={a.text!r}" for a in attempts[:: rl.GROUP]] for attempts in (rounds[0], rounds[-1])
    ]
    display.table(("first step", "last step"), list(zip(*said, strict=True)))
    return rewards


def judge(losses: list[float], resumed: list[tuple[float, float]], rewards: list[float]) -> list[str]:
    """What is wrong with the outcome, if anything."""
    problems = []
    if not sum(losses[-2:]) / 2 < 0.9 * losses[0]:
        problems.append(f"the loss did not fall: {losses[0]:.3f} to {losses[-1]:.3f}")
    for original, other in resumed:
        if not math.isclose(original, other, rel_tol=1e-3, abs_tol=1e-4):
            problems.append(f"the resumed model's loss is {other:.6f}, the original's {original:.6f}")
    last = sum(rewards[-2:]) / 2
    # A bigger model may know its sums from the start: nothing to rise to.
    if rewards[0] >= LEARNABLE and not (last > rewards[0] or last >= 0.9):
        problems.append(f"the reward did not rise: {rewards[0]:.2f} to {last:.2f}")
    return problems
