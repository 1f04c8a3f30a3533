"""Sampling through the API against vLLM's `LLM.generate`: tokens per second, and the first token."""

from __future__ import annotations

import statistics
from dataclasses import replace

import numpy as np
import tinker
from tinker import types

from bench.rows import Row, added_row, alternate, ratio_row, seconds
from bench.sampling.bare_vllm import ADAPTERS, BareVllm
from bench.stack import BASE_MODEL, Stack, next_token_datum, random_tokens, train, without_adapters
from bench.training.exactness import newest_snapshot

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 64, 64, 128
BASE_REPETITIONS, MANY_REPETITIONS, ONE_TOKEN_REPETITIONS = 7, 2, 60
ADAPTER_REPETITIONS, MANY_ADAPTER_REPETITIONS = 3, 1
GROUP, GROUP_TOKENS, ADAPTED_TOKENS = 16, 32, 2
"""Answers to each prompt, and their tokens, of a batch of 1,024 sequences; fewer tokens where they have
adapters, for which vLLM's own functions take many times as long on a CPU."""


def base_model(stack: Stack) -> list[Row]:
    """The base model: the throughput of a batch, and the time to a single token.

    Both engines compute in float32 and return the log-probability of every token. On a CPU vLLM's own
    compiles the model, which a sampler does only without adapters; `eager_ratio` is beside a third one that
    compiles nothing either.
    """
    client = stack.service.create_sampling_client(base_model=BASE_MODEL).result()
    bare = BareVllm(stack.model_dir, stack.threads, "plain", stack.scratch / "bare-vllm-plain.log")
    try:
        ours, theirs = _compare(stack, [client], bare, [], BASE_REPETITIONS)
        first = _one_token(stack, client, bare)
    finally:
        bare.close()
    eager = BareVllm(stack.model_dir, stack.threads, "eager", stack.scratch / "bare-vllm-eager.log")
    try:
        again, beside = _compare(stack, [client], eager, [], BASE_REPETITIONS, seed=5)
    finally:
        eager.close()
    row = ratio_row(
        "sampling, base model: API / plain LLM.generate", ours, theirs, PROMPTS * NEW_TOKENS, at_least=0.95
    )
    ratios = [without / mine for without, mine in zip(beside, again, strict=True)]
    return [replace(row, details={**row.details, "eager_ratio": round(statistics.median(ratios), 2)}), first]


def base_model_alone(stack: Stack) -> list[Row]:
    """The throughput of a sampler of the base model alone, which has no adapters, as plain vLLM has none."""
    bare = BareVllm(stack.model_dir, stack.threads, "plain", stack.scratch / "bare-vllm-alone.log")
    try:
        with without_adapters(stack) as other:
            client = other.service.create_sampling_client(base_model=BASE_MODEL).result()
            ours, theirs = _compare(other, [client], bare, [], BASE_REPETITIONS)
    finally:
        bare.close()
    name = "sampling, base model, sampler without adapters: API / plain LLM.generate"
    return [ratio_row(name, ours, theirs, PROMPTS * NEW_TOKENS, at_least=0.95)]


def adapters(stack: Stack) -> list[Row]:
    """Four adapters mixed in one batch, of 64 sequences and of 1,024, against LLM.generate with the same
    adapters."""
    rng = np.random.default_rng(3)
    clients, directories = [], []
    for _ in range(ADAPTERS):
        model = stack.new_model()
        train(model, [next_token_datum(random_tokens(rng, stack.vocab, 1, 64)[0])], 1e-3)
        clients.append(model.save_weights_and_get_sampling_client().result())
        directories.append(newest_snapshot(stack.data_dir, str(model.model_id)))
    bare = BareVllm(stack.model_dir, stack.threads, "lora", stack.scratch / "bare-vllm-lora.log")
    try:
        few = _compare(stack, clients, bare, directories, ADAPTER_REPETITIONS)
        many = _compare(stack, clients, bare, directories, MANY_ADAPTER_REPETITIONS, ADAPTED_TOKENS, GROUP)
    finally:
        bare.close()
    mixed, generate = f"sampling, {ADAPTERS} adapters mixed", "API / LLM.generate with LoRA"
    at_once = PROMPTS * GROUP
    return [
        ratio_row(f"{mixed}: {generate}", *few, PROMPTS * NEW_TOKENS, at_least=1.0),
        ratio_row(
            f"{mixed}, {at_once:,} sequences at once: {generate}",
            *many,
            at_once * ADAPTED_TOKENS,
            at_least=1.0,
        ),
    ]


def many_sequences(stack: Stack) -> list[Row]:
    """64 prompts with 16 answers each, as a step of RL asks for them: 1,024 sequences at once."""
    client = stack.service.create_sampling_client(base_model=BASE_MODEL).result()
    bare = BareVllm(stack.model_dir, stack.threads, "plain", stack.scratch / "bare-vllm-many.log")
    try:
        ours, theirs = _compare(stack, [client], bare, [], MANY_REPETITIONS, GROUP_TOKENS, GROUP)
    finally:
        bare.close()
    name = "sampling, base model, 1,024 sequences at once: API / plain LLM.generate"
    return [ratio_row(name, ours, theirs, PROMPTS * GROUP * GROUP_TOKENS, at_least=0.95)]


def _compare(
    stack: Stack,
    clients: list[tinker.SamplingClient],
    bare: BareVllm,
    directories: list,
    repetitions: int,
    tokens: int = NEW_TOKENS,
    group: int = 1,
    seed: int = 4,
) -> tuple[list[float], list[float]]:
    # New prompts every time, so that neither side finds them in its prefix cache.
    rng = np.random.default_rng(seed)
    prompts = [random_tokens(rng, stack.vocab, PROMPTS, PROMPT_TOKENS) for _ in range(repetitions + 1)]
    bare.generate(prompts[-1], 4, directories, group)
    sample(clients, prompts[-1], 4, group)
    ours, theirs = alternate(
        repetitions,
        lambda number: seconds(lambda: sample(clients, prompts[number], tokens, group)),
        lambda number: bare.generate(prompts[number], tokens, directories, group),
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


def sample(
    clients: list[tinker.SamplingClient], prompts: list[list[int]], max_tokens: int, group: int = 1
) -> None:
    """Samples `group` answers to every prompt, from each client in turn, and waits for all."""
    params = types.SamplingParams(max_tokens=max_tokens, temperature=1.0, stop=[])
    futures = [
        clients[number % len(clients)].sample(types.ModelInput.from_ints(prompt), group, params)
        for number, prompt in enumerate(prompts)
    ]
    for future in futures:
        counts = [len(sequence.tokens) for sequence in future.result().sequences]
        if counts != [max_tokens] * group:
            raise RuntimeError(f"asked for {group} x {max_tokens} tokens, got {counts}")
