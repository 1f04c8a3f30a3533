"""Tokens per second through the whole stack over tokens per second without it."""

from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np
import tinker
from tinker import types

from .bare_torch import BareLoop
from .bare_vllm import BareVllm
from .exactness import newest_snapshot
from .stack import (
    BASE_MODEL,
    RANK,
    Row,
    Stack,
    alternate,
    next_token_datum,
    random_tokens,
    seconds,
    train,
)

LEARNING_RATE = 1e-4
TRAIN_ROWS, TRAIN_TOKENS = 16, 128
SAMPLE_ROWS, PROMPT_TOKENS, NEW_TOKENS = 32, 64, 64
TRAIN_REPETITIONS, SAMPLE_REPETITIONS = 7, 5


def training(stack: Stack) -> Row:
    """forward_backward + optim_step against the loop in plain PyTorch: same model, batch, rank, threads."""
    batch = random_tokens(np.random.default_rng(2), stack.vocab, TRAIN_ROWS, TRAIN_TOKENS + 1)
    data = [next_token_datum(tokens) for tokens in batch]
    model = stack.new_model()
    loop = BareLoop(stack.model_dir, RANK, LEARNING_RATE, stack.threads)
    for _ in range(2):
        train(model, data, LEARNING_RATE)
        loop.step(batch)
    ours, bare = alternate(
        TRAIN_REPETITIONS,
        lambda _: seconds(lambda: train(model, data, LEARNING_RATE)),
        lambda _: seconds(lambda: loop.step(batch)),
    )
    return _row("training: whole stack / bare PyTorch + PEFT", ours, bare, TRAIN_ROWS * TRAIN_TOKENS)


def sampling(stack: Stack, log_dir: Path) -> list[Row]:
    """The base model and an adapter, through the API against `LLM.generate` on the same prompts.

    Both engines run eagerly, in float32, and return the log-probability of every token.
    """
    model = stack.new_model()
    rng = np.random.default_rng(3)
    train(model, [next_token_datum(random_tokens(rng, stack.vocab, 1, 64)[0])], 1e-3)
    adapted = model.save_weights_and_get_sampling_client().result()
    base = stack.service.create_sampling_client(base_model=BASE_MODEL).result()
    adapter = newest_snapshot(stack.data_dir, str(model.model_id))
    rows = []
    for name, client, directory in (("base model", base, None), ("adapter", adapted, adapter)):
        lora = directory is not None
        with BareVllm(
            stack.model_dir, stack.threads, lora, log_dir / f"bare-vllm-{name.split()[0]}.log"
        ) as bare:
            ours, theirs = _compare(stack, client, bare, directory)
        peer = "LLM.generate with LoRA" if lora else "plain LLM.generate"
        tokens = SAMPLE_ROWS * NEW_TOKENS
        rows.append(_row(f"sampling, {name}: API / {peer}", ours, theirs, tokens))
    return rows


def _compare(
    stack: Stack, client: tinker.SamplingClient, bare: BareVllm, adapter: Path | None
) -> tuple[list[float], list[float]]:
    # New prompts every time, so that neither side finds them in its prefix cache.
    rng = np.random.default_rng(4)
    prompts = [
        random_tokens(rng, stack.vocab, SAMPLE_ROWS, PROMPT_TOKENS) for _ in range(SAMPLE_REPETITIONS + 1)
    ]
    bare.generate(prompts[-1], 8, adapter)
    _sample(client, prompts[-1], 8)
    ours, theirs = alternate(
        SAMPLE_REPETITIONS,
        lambda number: seconds(lambda: _sample(client, prompts[number], NEW_TOKENS)),
        lambda number: bare.generate(prompts[number], NEW_TOKENS, adapter),
    )
    return ours, theirs


def _sample(client: tinker.SamplingClient, prompts: list[list[int]], max_tokens: int) -> None:
    params = types.SamplingParams(max_tokens=max_tokens, temperature=1.0, stop=[])
    futures = [client.sample(types.ModelInput.from_ints(prompt), 1, params) for prompt in prompts]
    for future in futures:
        count = len(future.result().sequences[0].tokens)
        if count != max_tokens:
            raise RuntimeError(f"asked for {max_tokens} tokens, got {count}")


def _row(name: str, ours: list[float], bare: list[float], tokens: int) -> Row:
    ratios = [theirs / mine for theirs, mine in zip(bare, ours, strict=True)]
    return Row(
        name,
        statistics.median(ratios),
        "x tokens/s",
        details={
            "ours_tokens_per_s": round(tokens / statistics.median(ours), 1),
            "bare_tokens_per_s": round(tokens / statistics.median(bare), 1),
            "lowest_ratio": round(min(ratios), 2),
            "highest_ratio": round(max(ratios), 2),
            "repetitions": len(ours),
        },
    )
