"""What measurements of a cluster start from: the running cluster, its model, and data for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil
import tinker
from tinker import types

from examples.demo import cluster
from services.launcher.tiny_model import make_tiny_model

BASE_MODEL = "bench/qwen3-23m"
RANK = 16
SEED = 0
CPU = ("--device", "cpu", "--dtype", "float32")
"""What clusters and yardsticks run on, and in."""
_TINY_VOCAB = 512


@dataclass(frozen=True)
class Stack:
    """A running cluster.

    Attributes:
        service: SDK session.
        data_dir: the cluster's, with its snapshots.
        model_dir: directory of the base model.
        scratch: for logs of yardsticks.
        vocab: tokens of the model.
        threads: of the trainer and of the sampler, and so of what they are compared with.
        pid: of `tinsmith up`.
    """

    service: tinker.ServiceClient
    base_url: str
    grpc_address: str
    api_key: str
    data_dir: Path
    model_dir: Path
    scratch: Path
    vocab: int
    threads: int
    pid: int

    def processes(self) -> list[psutil.Process]:
        """The cluster's."""
        return psutil.Process(self.pid).children(recursive=True)

    def new_model(self) -> tinker.TrainingClient:
        """A fresh adapter of rank RANK on every linear layer and the output head."""
        return self.service.create_lora_training_client(BASE_MODEL, rank=RANK, seed=SEED).result()


@contextmanager
def on_a_tiny_model(stack: Stack) -> Iterator[Stack]:
    """A cluster of its own on the model of the tests, beside another that rests: its passes are short, so
    what is measured is the passage through the services."""
    scratch = stack.scratch / "tiny"
    model_dir = make_tiny_model(scratch / "model", vocab=_TINY_VOCAB)
    with _another(replace(stack, scratch=scratch, model_dir=model_dir, vocab=_TINY_VOCAB)) as started:
        yield started


@contextmanager
def without_adapters(stack: Stack) -> Iterator[Stack]:
    """A cluster of its own on the same model, beside another that rests, whose sampler has no adapters."""
    with _another(replace(stack, scratch=stack.scratch / "base"), "--max-loras", "0") as started:
        yield started


@contextmanager
def _another(stack: Stack, *options: str) -> Iterator[Stack]:
    """A cluster of its own on the same model, with its data in `scratch`."""
    data_dir = stack.scratch / "data"
    with cluster.start(BASE_MODEL, str(stack.model_dir), data_dir, lambda _: None, *CPU, *options) as running:
        to = running.endpoint
        with tinker.ServiceClient(base_url=to.base_url, api_key=to.api_key) as service:
            yield replace(
                stack,
                service=service,
                base_url=to.base_url,
                grpc_address=to.grpc_address,
                api_key=to.api_key,
                data_dir=data_dir,
                pid=running.pid,
            )


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
