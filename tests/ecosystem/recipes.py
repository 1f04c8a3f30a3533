"""Runs the cookbook's recipes as a user does: `python -m`, in a directory with data, against a cluster.

Invariant: what runs is the installed tinker-cookbook as it is, in a process of its own that can reach no hub;
what it needs from one (tokenizers, data sets) lies in the directory under the hub's names, where
`transformers` and `datasets` look first.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.common.process.process import die_with_parent
from tests.cluster.conftest import Cluster

POLICY = "Qwen/Qwen3.5-9B"
TEACHER = "Qwen/Qwen3.6-35B-A3B"
"""The name that prompt_distillation.create_data asks for."""
RENDERER = "renderer_name=qwen3_5_disable_thinking"
SECONDS = 480
SAME_POLICY = 5e-9
"""What `optim/kl_sample_train_v2` (half the mean squared difference between a sampled token's log-probability
at the sampler and at the trainer, nats squared) stays below when both have the same weights: 1e-4 nats."""


@dataclass(frozen=True)
class Run:
    """What a recipe left behind."""

    command: str
    seconds: float
    output: str
    log: Path

    def metrics(self) -> list[dict[str, Any]]:
        """What was logged, a row a step."""
        return _lines(self.log / "metrics.jsonl")

    def checkpoints(self) -> list[dict[str, Any]]:
        return _lines(self.log / "checkpoints.jsonl")

    def series(self, name: str) -> list[float]:
        """A metric's values, in the steps that have it.

        Raises:
            AssertionError: no step has it; the message names those there are.
        """
        rows = self.metrics()
        values = [row[name] for row in rows if name in row]
        assert values, f"no {name} among {sorted({key for row in rows for key in row})}"
        return values


@dataclass
class Kitchen:
    """A working directory for recipes, and the cluster that they use."""

    directory: Path
    cluster: Cluster
    runs: int = field(default=0)

    def new_log(self) -> Path:
        self.runs += 1
        return self.directory / "logs" / str(self.runs)

    def cook(
        self, module: str, *options: str, log: Path | None = None, logs: bool = True, seconds: float = SECONDS
    ) -> Run:
        """Runs `python -m tinker_cookbook.recipes.MODULE OPTIONS log_path=LOG` to its end.

        The log is a new directory unless one is given. A recipe that keeps none is run with `logs=False`.

        Raises:
            AssertionError: it failed, or took too long; the message has the end of what it said.
        """
        log = log or self.new_log()
        begun = time.monotonic()
        process = self.start(module, *options, *([f"log_path={log}"] if logs else []))
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            raise AssertionError(f"{module} took over {seconds} s:\n{output[-6000:]}") from None
        assert process.returncode == 0, f"{module} failed:\n{output[-6000:]}"
        return Run(" ".join([module, *options]), time.monotonic() - begun, output, log)

    def start(self, module: str, *options: str) -> subprocess.Popen[str]:
        """Starts it and returns at once. Its output is a pipe."""
        return subprocess.Popen(
            [sys.executable, "-m", f"tinker_cookbook.recipes.{module}", *options],
            cwd=self.directory,
            env={**_without(os.environ, "PYTHONPATH"), **self.environment()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # A test run that is killed leaves no recipe behind.
            preexec_fn=die_with_parent,
        )

    def environment(self) -> dict[str, str]:
        return {
            "TINKER_BASE_URL": self.cluster.base_url,
            "TINKER_API_KEY": self.cluster.api_key,
            "TINKER_COOKBOOK_RUNS_DIR": str(self.directory / "runs"),
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(self.directory / "hub"),
            "OMP_NUM_THREADS": "1",
        }


def trained(run: Run, *, on_policy: bool = True) -> str:
    """What the table says of a run in which rewards differed within groups, and the model was moved by it."""
    rewards, mixed = run.series("env/all/reward/total"), run.series("env/all/by_group/frac_mixed")
    norms = run.series("grad_norm")
    assert max(mixed) > 0, rewards
    assert max(norms) > 0
    said = f"reward {rewards[0]:.2f} to {rewards[-1]:.2f}; gradients' norms up to {max(norms):.2g}"
    if not on_policy:
        return said
    apart = max(run.series("optim/kl_sample_train_v2"))
    assert apart < SAME_POLICY
    return f"{said}; sampler and trainer apart by {apart:.0e}"


def lay_out_tokenizer(target: Path, model: Path) -> None:
    """Puts a model's tokenizer where recipes find it by a name."""
    target.mkdir(parents=True)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / file, target)


def write_data_set(directory: Path, config: str = "default", **splits: Sequence[Mapping[str, Any]]) -> None:
    """Writes a data set that `datasets.load_dataset(directory)` reads, with these rows in its splits."""
    directory.mkdir(parents=True, exist_ok=True)
    files = []
    for split, rows in splits.items():
        (directory / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        files.append(f"  - split: {split}\n    path: {split}.jsonl\n")
    card = f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{''.join(files)}---\n"
    (directory / "README.md").write_text(card)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _without(environment: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in names}
