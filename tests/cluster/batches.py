"""Training data for the cluster tests."""

from __future__ import annotations

import random
from collections.abc import Sequence

import tinker
import torch
from tinker import types

from tests.cluster.conftest import VOCAB


def tokens(seed: int, length: int) -> list[int]:
    """Random ids, none of them special."""
    generator = random.Random(seed)
    return [generator.randrange(VOCAB - 3) for _ in range(length)]


def cross_entropy(seed: int, length: int, weights: Sequence[float] | None = None) -> types.Datum:
    """Next-token prediction over `length` random tokens."""
    sequence = tokens(seed, length + 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints(sequence[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_torch(torch.tensor(sequence[1:])),
            "weights": types.TensorData.from_torch(torch.tensor(list(weights or [1.0] * length))),
        },
    )


def policy(seed: int, length: int, logprobs: Sequence[float], advantages: Sequence[float]) -> types.Datum:
    """An importance-sampling example over `length` random tokens."""
    sequence = tokens(seed, length + 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints(sequence[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_torch(torch.tensor(sequence[1:])),
            "logprobs": types.TensorData.from_torch(torch.tensor(list(logprobs))),
            "advantages": types.TensorData.from_torch(torch.tensor(list(advantages))),
        },
    )


def inputs(datum: types.Datum) -> list[int]:
    return datum.model_input.to_ints()


def targets(datum: types.Datum) -> list[int]:
    return datum.loss_fn_inputs["target_tokens"].to_torch().tolist()


def field(datum: types.Datum, name: str) -> torch.Tensor:
    return datum.loss_fn_inputs[name].to_torch()


def logprobs(output: tinker.ForwardBackwardOutput) -> list[torch.Tensor]:
    """The learner's log-probabilities, one tensor a datum."""
    return [record["logprobs"].to_torch() for record in output.loss_fn_outputs]
