"""Supervised fine-tuning: sixteen answers teach a manner of speaking, and a checkpoint resumes exactly."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import tinker
from tinker import types

from .chat import Tokenizer, answer_tokens, prompt_tokens, supervised

SYSTEM = "You are a helpful assistant."
LESSONS = (
    ("What is the capital of France?", "Paris"),
    ("Which planet is the largest?", "Jupiter"),
    ("What color is the sky?", "Blue"),
    ("How many legs has a spider?", "Eight"),
    ("What do bees make?", "Honey"),
    ("What is the opposite of hot?", "Cold"),
    ("Which animal barks?", "A dog"),
    ("What freezes into ice?", "Water"),
    ("What is the capital of Japan?", "Tokyo"),
    ("How many days has a week?", "Seven"),
    ("What do cows drink?", "Water"),
    ("Which metal is liquid?", "Mercury"),
    ("What is the opposite of up?", "Down"),
    ("What color is grass?", "Green"),
    ("Which season is the coldest?", "Winter"),
    ("What do hens lay?", "Eggs"),
)
# Not among the lessons: what carries over to these was learned, not memorized.
EXAM = (
    "What is the capital of Italy?",
    "What is the opposite of big?",
    "What is the opposite of day?",
    "What is the capital of Spain?",
)
BATCH = 8
STEPS = 14
ADAM = types.AdamParams(learning_rate=1e-3)


def manner(answer: str) -> str:
    """The way of speaking that is taught."""
    return f"{answer}, by hammer and tin!"


def lessons(tokenizer: Tokenizer) -> list[types.Datum]:
    """The training set."""
    return [
        supervised(prompt_tokens(tokenizer, question, SYSTEM), answer_tokens(tokenizer, manner(answer)))
        for question, answer in LESSONS
    ]


def train(
    training: tinker.TrainingClient, data: Sequence[types.Datum], report: Callable[[float], None]
) -> list[float]:
    """Trains for STEPS steps and returns the loss per answer token before each of them."""
    shuffle = random.Random(0)
    order: list[types.Datum] = []
    losses = []
    for _ in range(STEPS):
        if len(order) < BATCH:
            order = shuffle.sample(list(data), len(data))
        batch, order = order[:BATCH], order[BATCH:]
        losses.append(step(training, batch))
        report(losses[-1])
    return losses


def step(training: tinker.TrainingClient, batch: list[types.Datum]) -> float:
    """One optimizer step; returns the loss per answer token before it."""
    # Both calls are on their way before the first result is waited for: no round trip in between.
    passed = training.forward_backward(batch, "cross_entropy")
    stepped = training.optim_step(ADAM)
    loss = passed.result().metrics["loss:sum"]
    stepped.result()
    return loss / sum(float(datum.loss_fn_inputs["weights"].to_numpy().sum()) for datum in batch)


def answers(sampling: tinker.SamplingClient, tokenizer: Tokenizer) -> list[str]:
    """What the model says to the EXAM questions, greedily."""
    params = types.SamplingParams(max_tokens=18, temperature=0.0)
    prompts = [types.ModelInput.from_ints(prompt_tokens(tokenizer, question, SYSTEM)) for question in EXAM]
    futures = [sampling.sample(prompt, 1, params) for prompt in prompts]
    return [
        tokenizer.decode(future.result().sequences[0].tokens, skip_special_tokens=True).strip()
        for future in futures
    ]


def resume(
    service: tinker.ServiceClient, training: tinker.TrainingClient, batch: list[types.Datum]
) -> tuple[str, list[tuple[float, float]]]:
    """Saves a checkpoint, resumes from it in a new model, and trains both on.

    Returns:
        The checkpoint's path, and the losses of the original and of the resumed model: first those of
        the saved weights, then those after one more step each, which also needs the same optimizer state.
    """
    path = training.save_state("after-sft").result().path
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    return path, [(step(training, batch), step(resumed, batch)) for _ in range(2)]
