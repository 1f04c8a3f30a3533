"""Reinforcement learning with a verifiable reward: short sums from reasoning-gym, judged by its scorer.

The base model rambles after "8 + 5 ="; reward 1 needs the number and nothing else. Each step samples
GROUP answers to each of PROBLEMS sums it has not trained on, and moves probability to those that did
better than their group's mean.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import reasoning_gym
import tinker
from tinker import types

from .chat import Tokenizer, prompt_tokens, reinforced

SYSTEM = "Answer with a number."
PROBLEMS = 6
GROUP = 8
STEPS = 7
ADAM = types.AdamParams(learning_rate=5e-4)
SAMPLING = types.SamplingParams(max_tokens=4, temperature=1.0)


@dataclass(frozen=True)
class Attempt:
    """One sampled answer to one problem."""

    problem: str
    text: str
    reward: float


class Sums:
    """Additions of two digits, in an endless order that is the same in every run."""

    def __init__(self) -> None:
        self._source: Any = reasoning_gym.create_dataset(
            "chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1, size=1000, seed=3
        )
        self._additions = itertools.cycle([entry for entry in self._source if "+" in self.expression(entry)])

    @staticmethod
    def expression(entry: dict[str, Any]) -> str:
        return str(entry["metadata"]["expression"])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._additions

    def reward(self, answer: str, entry: dict[str, Any]) -> float:
        """1 for the number alone, less the more is around it, 0 when it is wrong."""
        return float(self._source.score_answer(answer.strip(), entry))


def train(
    training: tinker.TrainingClient, tokenizer: Tokenizer, report: Callable[[float, list[Attempt]], None]
) -> list[float]:
    """Trains for STEPS steps and returns the mean reward that each step's weights earned."""
    sums = Sums()
    problems = iter(sums)
    rewards = []
    for _ in range(STEPS):
        attempts, data = rollout(training, tokenizer, sums, list(itertools.islice(problems, PROBLEMS)))
        rewards.append(sum(attempt.reward for attempt in attempts) / len(attempts))
        report(rewards[-1], attempts)
        if data:
            passed = training.forward_backward(data, "importance_sampling")
            training.optim_step(ADAM).result()
            passed.result()
    return rewards


def rollout(
    training: tinker.TrainingClient, tokenizer: Tokenizer, sums: Sums, problems: list[dict[str, Any]]
) -> tuple[list[Attempt], list[types.Datum]]:
    """Samples a group of answers to each problem from the current weights.

    Returns:
        All attempts, and a datum for each of those that did better or worse than its group's mean.
    """
    sampling = training.save_weights_and_get_sampling_client().result()
    prompts = [
        prompt_tokens(tokenizer, f"{expression} = ?", SYSTEM, answer_start=f"{expression} =")
        for expression in map(sums.expression, problems)
    ]
    futures = [sampling.sample(types.ModelInput.from_ints(prompt), GROUP, SAMPLING) for prompt in prompts]
    attempts: list[Attempt] = []
    data: list[types.Datum] = []
    for entry, prompt, future in zip(problems, prompts, futures, strict=True):
        sequences = future.result().sequences
        texts = [tokenizer.decode(sequence.tokens, skip_special_tokens=True) for sequence in sequences]
        scores = [sums.reward(text, entry) for text in texts]
        mean = sum(scores) / len(scores)
        for sequence, text, score in zip(sequences, texts, scores, strict=True):
            attempts.append(Attempt(sums.expression(entry), text, score))
            if abs(score - mean) > 1e-6:
                data.append(reinforced(prompt, sequence.tokens, sequence.logprobs or [], score - mean))
    return attempts, data
