"""Text to tokens and back, and token sequences to the `Datum`s that training calls take.

Invariant: position i of a datum's arrays is about predicting token i + 1 of the sequence, and only tokens
of the answer count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tinker import types

Tokenizer = Any


def prompt_tokens(tokenizer: Tokenizer, question: str, system: str, answer_start: str = "") -> list[int]:
    """A conversation up to where the assistant speaks, with the first words put into its mouth."""
    if tokenizer.chat_template is None:
        text = f"{system}\n\nQuestion: {question}\nAnswer:{' ' * bool(answer_start)}"
        prompt = tokenizer.encode(text)
    else:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    if answer_start:
        prompt = prompt + tokenizer.encode(answer_start, add_special_tokens=False)
    return prompt


def answer_tokens(tokenizer: Tokenizer, answer: str) -> list[int]:
    """An assistant's whole turn: the text and the token that ends it."""
    return [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]


def supervised(prompt: Sequence[int], answer: Sequence[int]) -> types.Datum:
    """A datum for `cross_entropy`: every token of the answer has weight 1, those of the prompt 0."""
    tokens = [*prompt, *answer]
    weights = np.zeros(len(tokens) - 1, dtype=np.float32)
    weights[len(prompt) - 1 :] = 1.0
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": _targets(tokens), "weights": types.TensorData.from_numpy(weights)},
    )


def reinforced(
    prompt: Sequence[int], answer: Sequence[int], logprobs: Sequence[float], advantage: float
) -> types.Datum:
    """A datum for `importance_sampling`: the answer's tokens carry the advantage and the log-probabilities
    under which they were sampled; the prompt's have advantage 0."""
    tokens = [*prompt, *answer]
    q = np.zeros(len(tokens) - 1, dtype=np.float32)
    q[len(prompt) - 1 :] = logprobs
    advantages = np.zeros(len(tokens) - 1, dtype=np.float32)
    advantages[len(prompt) - 1 :] = advantage
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": _targets(tokens),
            "logprobs": types.TensorData.from_numpy(q),
            "advantages": types.TensorData.from_numpy(advantages),
        },
    )


def _targets(tokens: Sequence[int]) -> types.TensorData:
    return types.TensorData.from_numpy(np.array(tokens[1:], dtype=np.int64))
