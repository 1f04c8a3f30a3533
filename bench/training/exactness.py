"""How far the trainer's and the sampler's log-probabilities are from plain PyTorch's, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tinker
from tinker import types

from bench.rows import Row
from bench.stack import Stack, next_token_datum, random_tokens, train
from bench.training import bare_torch

LENGTHS = (17, 64, 128)


def measure(stack: Stack) -> list[Row]:
    """Compares a fresh and a trained adapter on sequences of several lengths."""
    rng = np.random.default_rng(1)
    sequences = [random_tokens(rng, stack.vocab, 1, length)[0] for length in LENGTHS for _ in range(2)]
    model = stack.new_model()
    fresh = trainer_logprobs(model, sequences)
    for _ in range(4):
        train(model, [next_token_datum(tokens) for tokens in sequences], learning_rate=3e-3)
    sampler = model.save_weights_and_get_sampling_client().result()
    adapter = newest_snapshot(stack.data_dir, str(model.model_id))
    trained = trainer_logprobs(model, sequences)

    reference_fresh = bare_torch.logprobs(stack.model_dir, None, sequences)
    reference_trained = bare_torch.logprobs(stack.model_dir, adapter, sequences)
    expected = [scores.numpy() for scores in (*reference_fresh, *reference_trained)]
    moved = max_difference(fresh, trained)
    return [
        Row(
            "trainer logprobs - plain PyTorch fp32",
            max_difference([*fresh, *trained], expected),
            "max |difference|, nats",
            at_most=1e-5,
            required=True,
            details={"tokens": 2 * sum(len(s) - 1 for s in sequences), "training_moved_logprobs_by": moved},
        ),
        _sampler_row(model, sampler, sequences, trained),
    ]


def _sampler_row(
    model: tinker.TrainingClient,
    sampler: tinker.SamplingClient,
    sequences: list[list[int]],
    trained: list[np.ndarray],
) -> Row:
    """Prompts are scored, and what is sampled after them, with the trained adapter."""
    scored = [future.result() for future in [_score(sampler, tokens) for tokens in sequences]]
    prompt_difference = max_difference([np.array(row[1:], dtype=np.float32) for row in scored], trained)
    params = types.SamplingParams(max_tokens=16, temperature=1.0, stop=[], seed=7)
    futures = [sampler.sample(types.ModelInput.from_ints(tokens), 2, params) for tokens in sequences]
    full, sampled = [], []
    for tokens, future in zip(sequences, futures, strict=True):
        for sequence in future.result().sequences:
            full.append([*tokens, *sequence.tokens])
            sampled.append(np.array(sequence.logprobs, dtype=np.float32))
    from_trainer = trainer_logprobs(model, full)
    own = [row[-len(mine) :] for row, mine in zip(from_trainer, sampled, strict=True)]
    sampled_difference = max_difference(sampled, own)
    return Row(
        "sampler logprobs - trainer's",
        max(prompt_difference, sampled_difference),
        "max |difference|, nats",
        at_most=1e-4,
        required=True,
        details={"prompt_tokens": prompt_difference, "sampled_tokens": sampled_difference},
    )


def _score(sampler: tinker.SamplingClient, tokens: list[int]) -> tinker.APIFuture[list[float | None]]:
    return sampler.compute_logprobs(types.ModelInput.from_ints(tokens))


def trainer_logprobs(model: tinker.TrainingClient, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Log-probability of every token after the first, float32 [N - 1] each, by `forward`."""
    output = model.forward([next_token_datum(tokens) for tokens in sequences], "cross_entropy").result()
    return [row["logprobs"].to_numpy() for row in output.loss_fn_outputs]


def newest_snapshot(data_dir: Path, model_id: str) -> Path:
    """PEFT directory of the model's newest snapshot."""
    versions = [path for path in (data_dir / "snapshots" / model_id).iterdir() if path.name.isdigit()]
    return max(versions, key=lambda path: int(path.name))


def max_difference(left: Sequence[np.ndarray], right: Sequence[np.ndarray]) -> float:
    """Largest absolute difference over all elements; not-a-number counts as infinite."""
    largest = max(float(np.max(np.abs(a - b))) for a, b in zip(left, right, strict=True))
    return largest if np.isfinite(largest) else float("inf")
