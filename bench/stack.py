"""What every measurement starts from: the running cluster, its model, and rows of results.

Invariant: a row's value is a ratio or a difference of two things measured in this run, on the same model,
with the same number of threads each, or a time that is claimed as such; absolute figures are in its details.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tinker
from tinker import types

BASE_MODEL = "bench/qwen3-23m"
RANK = 16
SEED = 0


@dataclass(frozen=True)
class Stack:
    """A running cluster.

    Attributes:
        service: SDK session.
        data_dir: the cluster's, with its snapshots.
        model_dir: directory of the base model.
        vocab: tokens of the model.
        threads: of the trainer and of the sampler, and so of what they are compared with.
    """

    service: tinker.ServiceClient
    base_url: str
    grpc_address: str
    api_key: str
    data_dir: Path
    model_dir: Path
    vocab: int
    threads: int

    def new_model(self) -> tinker.TrainingClient:
        """A fresh adapter of rank RANK on every linear layer and the output head."""
        return self.service.create_lora_training_client(BASE_MODEL, rank=RANK, seed=SEED).result()


@dataclass(frozen=True)
class Row:
    """One line of the report.

    Attributes:
        name: what was measured.
        value: the ratio or difference.
        unit: what `value` is: "x" for a ratio.
        bound: a claim about `value` that this run must meet, or None.
        details: absolute figures behind it, with their units in the keys.
    """

    name: str
    value: float
    unit: str
    bound: float | None = None
    details: dict[str, float | int | str] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """False when the value is above its bound."""
        return self.bound is None or self.value <= self.bound


def random_tokens(rng: np.random.Generator, vocab: int, rows: int, length: int) -> list[list[int]]:
    """Token ids, uniform over the vocabulary: `rows` lists of `length`."""
    return [[int(token) for token in row] for row in rng.integers(0, vocab, (rows, length))]


def next_token_datum(tokens: Sequence[int]) -> types.Datum:
    """Every token after the first is a target of weight 1."""
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.array(tokens[1:], dtype=np.int64)),
            "weights": types.TensorData.from_numpy(np.ones(len(tokens) - 1, dtype=np.float32)),
        },
    )


def train(model: tinker.TrainingClient, data: list[types.Datum], learning_rate: float) -> None:
    """One forward_backward and one optim_step, both results waited for."""
    passed = model.forward_backward(data, "cross_entropy")
    stepped = model.optim_step(types.AdamParams(learning_rate=learning_rate))
    passed.result()
    stepped.result()


def seconds(work: Callable[[], object]) -> float:
    """Wall-clock seconds of a call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def alternate(repetitions: int, *sides: Callable[[int], float]) -> list[list[float]]:
    """Calls the sides in turn, `repetitions` times, so that a slow minute of the machine meets all of them.

    Each side is called with the number of the repetition. Returns one list of results per side.
    """
    results: list[list[float]] = [[] for _ in sides]
    for repetition in range(repetitions):
        for side, kept in zip(sides, results, strict=True):
            kept.append(side(repetition))
    return results
