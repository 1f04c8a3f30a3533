"""Sampling through the API against vLLM's `LLM.generate`: tokens per second, and the first token."""

from __future__ import annotations

import numpy as np
import tinker
from tinker import types

from .bare_vllm import ADAPTERS, BareVllm
from .exactness import newest_snapshot
from .stack import (
    BASE_MODEL,
    Row,
    Stack,
    added_row,
    alternate,
    next_token_datum,
    random_tokens,
    ratio_row,
    seconds,
    train,
)

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 64, 64, 128
BASE_REPETITIONS, ADAPTER_REPETITIONS, ONE_TOKEN_REPETITIONS = 2, 1, 30


def base_model(stack: Stack) -> list[Row]:
    """The base model: the throughput of a batch, and the time to a single token.

    Both engines run eagerly, in float32, and return the log-probability of every token.
    """
    client = stack.service.create_sampling_client(base_model=BASE_MODEL).result()
    bare = BareVllm(stack.model_dir, stack.threads, False, stack.scratch / "bare-vllm-plain.log")
    try:
        ours, theirs = _compare(stack, [client], bare, [], BASE_REPETITIONS)
        first = _one_token(stack, client, bare)
    finally:
        bare.close()
    name = "sampling, base model: API / plain LLM.generate"
    return [ratio_row(name, ours, theirs, PROMPTS * NEW_TOKENS, at_least=0.9), first]


def adapters(stack: Stack) -> list[Row]:
    """Four adapters mixed in one batch, against LLM.generate with the same adapters."""
    rng = np.random.default_rng(3)
    clients, directories = [], []
    for _ in range(ADAPTERS):
        model = stack.new_model()
        train(model, [next_token_datum(random_tokens(rng, stack.vocab, 1, 64)[0])], 1e-3)
        clients.append(model.save_weights_and_get_sampling_client().result())
        directories.append(newest_snapshot(stack.data_dir, str(model.model_id)))
    bare = BareVllm(stack.model_dir, stack.threads, True, stack.scratch / "bare-vllm-lora.log")
    try:
        ours, theirs = _compare(stack, clients, bare, directories, ADAPTER_REPETITIONS)
    finally:
        bare.close()
    name = f"sampling, {ADAPTERS} adapters mixed: API / LLM.generate with LoRA"
    return [ratio_row(name, ours, theirs, PROMPTS * NEW_TOKENS, at_least=0.9)]


def _compare(
    stack: Stack, clients: list[tinker.SamplingClient], bare: BareVllm, directories: list, repetitions: int
) -> tuple[list[float], list[float]]:
    # New prompts every time, so that neither side finds them in its prefix cache.
    rng = np.random.default_rng(4)
    prompts = [random_tokens(rng, stack.vocab, PROMPTS, PROMPT_TOKENS) for _ in range(repetitions + 1)]
    bare.generate(prompts[-1], 4, directories)
    sample(clients, prompts[-1], 4)
    ours, theirs = alternate(
        repetitions,
        lambda number: seconds(lambda: sample(clients, prompts[number], NEW_TOKENS)),
        lambda number: bare.generate(prompts[number], NEW_TOKENS, directories),
    )
    return ours, theirs


def _one_token(stack: Stack, client: tinker.SamplingClient, bare: BareVllm) -> Row:
    rng = np.random.default_rng(8)
    count = ONE_TOKEN_REPETITIONS + 2
    prompts = [random_tokens(rng, stack.vocab, 1, PROMPT_TOKENS) for _ in range(count)]
    ours, theirs = alternate(
        count,
        lambda number: seconds(lambda: sample([client], prompts[number], 1)),
        lambda number: bare.generate(prompts[number], 1, []),
    )
    return one_token_row(ours[2:], theirs[2:])


def one_token_row(ours: list[float], theirs: list[float]) -> Row:
    """Median of one token through the API minus that of the engine alone."""
    row = added_row("sampling one token: API - LLM.generate", ours, theirs, ("ours", "engine"), at_most=15.0)
    row.details["prompt_tokens"] = PROMPT_TOKENS
    return row


def sample(clients: list[tinker.SamplingClient], prompts: list[list[int]], max_tokens: int) -> None:
    """Samples from every prompt, from each client in turn, and waits for all."""
    params = types.SamplingParams(max_tokens=max_tokens, temperature=1.0, stop=[])
    futures = [
        clients[number % len(clients)].sample(types.ModelInput.from_ints(prompt), 1, params)
        for number, prompt in enumerate(prompts)
    ]
    for future in futures:
        count = len(future.result().sequences[0].tokens)
        if count != max_tokens:
            raise RuntimeError(f"asked for {max_tokens} tokens, got {count}")
