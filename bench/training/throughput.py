"""Training throughput: the stack against a bare loop and against its own engine, many tenants against one."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import tinker
from tinker import types

from bench.rows import Row, alternate, ratio_row, seconds
from bench.stack import RANK, Stack, next_token_datum, random_tokens, train
from bench.training.bare_engine import BareEngine
from bench.training.bare_torch import BareLoop

LEARNING_RATE = 1e-4
ROWS, TOKENS, TRAINING_REPETITIONS, REPETITIONS = 32, 128, 9, 5
TENANTS, TENANTS_REPETITIONS = 4, 21
MIXED = 10
PROMPT, ANSWERS, ANSWER = 512, 16, 64
SMALL_TOKENS, SMALL_STEPS, SMALL_REPETITIONS = 16, 8, 9


def training(stack: Stack) -> list[Row]:
    """forward_backward + optim_step of one batch, all on the same model, rank and number of threads.

    The stack is compared with the loop one would write in plain PyTorch; with the trainer's engine alone, so
    that the difference is what journal, snapshots, scheduling and transport cost; and with four tenants that
    send a quarter of the batch each, at the same time.
    """
    batch = random_tokens(np.random.default_rng(2), stack.vocab, ROWS, TOKENS + 1)
    data = [next_token_datum(tokens) for tokens in batch]
    share = ROWS // TENANTS
    shares = [data[start : start + share] for start in range(0, ROWS, share)]
    model, tenants = stack.new_model(), [stack.new_model() for _ in range(TENANTS)]
    loop = BareLoop(stack.model_dir, RANK, LEARNING_RATE, stack.threads)
    engine = BareEngine(stack.model_dir, stack.threads, stack.scratch / "bare-engine.log")

    def by_one(_: int) -> float:
        return seconds(lambda: train(model, data, LEARNING_RATE))

    sides: list[Callable[[int], float]] = [
        by_one,
        lambda _: seconds(lambda: loop.step(batch)),
        lambda _: engine.train(batch, LEARNING_RATE),
    ]
    try:
        alternate(1, *sides)
        ours, bare, alone = alternate(TRAINING_REPETITIONS, *sides)
    finally:
        engine.close()
    # By themselves: of two sides of one process, the one that comes after another process finds cold caches.
    of_tenants: list[Callable[[int], float]] = [
        lambda _: seconds(lambda: _train_together(tenants, shares)),
        by_one,
    ]
    alternate(1, *of_tenants)
    together, one = alternate(TENANTS_REPETITIONS, *of_tenants)
    tokens = ROWS * TOKENS
    return [
        ratio_row("training: whole stack / bare PyTorch + PEFT", ours, bare, tokens, at_least=1.0),
        ratio_row(
            "training with journal and snapshots: whole stack / its engine alone",
            ours,
            alone,
            tokens,
            at_least=0.95,
        ),
        ratio_row(
            f"{TENANTS} tenants at once / 1 tenant with the same batch", together, one, tokens, at_least=1.0
        ),
    ]


def mixed_lengths(stack: Stack) -> list[Row]:
    """The same of sequences of many lengths, log-normal, which a plain loop fills up to the longest."""
    rng = np.random.default_rng(5)
    lengths = np.clip(np.exp(rng.normal(np.log(180), 0.8, MIXED)), 32, 1024).astype(int).tolist()
    batch = [random_tokens(rng, stack.vocab, 1, length + 1)[0] for length in lengths]
    data = [next_token_datum(tokens) for tokens in batch]
    model = stack.new_model()
    loop = BareLoop(stack.model_dir, RANK, LEARNING_RATE, stack.threads)
    sides: list[Callable[[int], float]] = [
        lambda _: seconds(lambda: train(model, data, LEARNING_RATE)),
        lambda _: seconds(lambda: loop.step(batch)),
    ]
    alternate(1, *sides)
    ours, bare = alternate(REPETITIONS, *sides)
    name = "training on lengths log-normal from 32 to 1024: whole stack / bare PyTorch + PEFT"
    row = ratio_row(name, ours, bare, sum(lengths), at_least=1.3)
    return [replace(row, details={**row.details, "sequences": MIXED, "longest": max(lengths)})]


def _train_together(tenants: list[tinker.TrainingClient], shares: list[list[types.Datum]]) -> None:
    """One step of every tenant; all are sent before any result is waited for."""
    sent: list[tinker.APIFuture[Any]] = []
    for tenant, share in zip(tenants, shares, strict=True):
        sent.append(tenant.forward_backward(share, "cross_entropy"))
        sent.append(tenant.optim_step(types.AdamParams(learning_rate=LEARNING_RATE)))
    for future in sent:
        future.result()


def shared_prefixes(stack: Stack) -> list[Row]:
    """Answers to one prompt, as every RL group is: its engine with the prompt once, and for every answer."""
    rng = np.random.default_rng(8)
    (prompt,) = random_tokens(rng, stack.vocab, 1, PROMPT)
    # One token more, as the last is a target only.
    batch = [prompt + answer for answer in random_tokens(rng, stack.vocab, ANSWERS, ANSWER + 1)]
    engine = BareEngine(stack.model_dir, stack.threads, stack.scratch / "prefix-engine.log")
    sides: list[Callable[[int], float]] = [
        lambda _: engine.train(batch, LEARNING_RATE),
        lambda _: engine.train(batch, LEARNING_RATE, shared=False),
    ]
    try:
        alternate(1, *sides)
        ours, apart = alternate(REPETITIONS, *sides)
    finally:
        engine.close()
    name = f"training on {ANSWERS} answers of {ANSWER} tokens to a prompt of {PROMPT}"
    sent = ANSWERS * (PROMPT + ANSWER)
    return [ratio_row(f"{name}: shared prefix / without", ours, apart, sent, at_least=4.0)]


def small_tenants(stack: Stack) -> list[Row]:
    """Tenants that step with one small datum at a time and wait for each step: at once, and in turn.

    The trainer's engine alone is given the same, at once as one pass and one command of steps: where that
    gains less than the whole stack should, the model's own arithmetic bounds it.
    """
    rng = np.random.default_rng(7)
    tenants = [stack.new_model() for _ in range(TENANTS)]
    batches = [random_tokens(rng, stack.vocab, 1, SMALL_TOKENS + 1) for _ in tenants]
    data = [next_token_datum(batch[0]) for batch in batches]
    engine = BareEngine(stack.model_dir, stack.threads, stack.scratch / "small-engine.log")

    def steps(number: int) -> None:
        for _ in range(SMALL_STEPS):
            train(tenants[number], [data[number]], LEARNING_RATE)

    def engine_in_turn(_: int) -> float:
        return sum(engine.train(batch, LEARNING_RATE) for batch in batches for _ in range(SMALL_STEPS))

    def engine_at_once(_: int) -> float:
        return sum(engine.train_together(batches, LEARNING_RATE) for _ in range(SMALL_STEPS))

    try:
        with ThreadPoolExecutor(TENANTS) as pool:
            sides: list[Callable[[int], float]] = [
                lambda _: seconds(lambda: list(pool.map(steps, range(TENANTS)))),
                lambda _: seconds(lambda: list(map(steps, range(TENANTS)))),
                engine_at_once,
                engine_in_turn,
            ]
            alternate(1, *sides)
            at_once, in_turn, alone_at_once, alone_in_turn = alternate(SMALL_REPETITIONS, *sides)
    finally:
        engine.close()
    tokens = TENANTS * SMALL_STEPS * SMALL_TOKENS
    name = f"{TENANTS} tenants with steps of {SMALL_TOKENS} tokens: at once / one after another"
    row = ratio_row(name, at_once, in_turn, tokens, at_least=2.0)
    alone = [theirs / mine for theirs, mine in zip(alone_in_turn, alone_at_once, strict=True)]
    return [replace(row, details={**row.details, "engine_alone_ratio": round(statistics.median(alone), 2)})]
