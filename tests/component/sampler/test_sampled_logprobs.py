"""Log-probabilities of what tokens were drawn from, beside the model's own in the same steps, against plain
PyTorch in float32."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from tests.component.sampler.drawn_from import drawn_from
from tests.component.sampler.process import (
    NEVER,
    Sampler,
    floats,
    ints,
    prompt,
    request,
    sample,
)
from tests.reference import check_logprobs
from tinsmith.internal.v1 import sampler_pb2, sampler_pb2_grpc
from tinsmith.v1 import sampling_pb2

pytestmark = pytest.mark.heavy

K, LETTERS = 4, (64, 65, 66, 67)
EOS = sampling_pb2.StopCondition(model_eos={})
LETTERS_LONG = 12
REGEX = f"[abc]{{{LETTERS_LONG}}}"


def steered() -> list[sampler_pb2.SampleRequest]:
    """Requests that are sampled in every way, of the base model and of an adapter."""
    common: dict[str, object] = {"max_tokens": 12, "stop": NEVER}
    every = [
        request(prompt(1, 20), n=2, seed=1, **common),
        request(prompt(2, 9), 1, n=2, seed=2, temperature=0.7, top_k=20, top_p=0.9, **common),
        request(prompt(3, 12), 1, seed=3, top_p=0.5, **common),
        request(prompt(4, 30), seed=4, top_k=2, **common),
        request(prompt(5, 6), seed=5, min_p=0.4, temperature=1.6, **common),
        _lettered(request(prompt(6, 7), seed=6, temperature=0.5, **common)),
        _lettered(request(prompt(7, 7), seed=7, frequency_penalty=0.7, presence_penalty=-1.2, **common)),
        _lettered(request(prompt(8, 7), 1, seed=8, repetition_penalty=1.3, top_k=10, **common)),
        _lettered(request(prompt(9, 7), seed=9, bad_words=["ab", "c"], min_p=0.1, **common)),
        request(prompt(10, 8), temperature=0.0, **common),
        request(prompt(10, 8), 1, temperature=0.0, frequency_penalty=2.0, repetition_penalty=1.7, **common),
        request(prompt(11, 8), seed=10, max_tokens=40, stop=EOS, top_p=0.95),
        request(prompt(12, 8), temperature=0.0, max_tokens=40, stop=EOS),
    ]
    for wanted in every[-2:]:
        wanted.constraint.regex = REGEX
    for wanted in every:
        wanted.topk_sample_logprobs = K
    return every


def _lettered(wanted: sampler_pb2.SampleRequest) -> sampler_pb2.SampleRequest:
    for token in LETTERS:
        wanted.params.logit_bias.add(token_id=token, bias=8.0)
    return wanted


async def test_they_are_of_what_each_token_was_drawn_from_and_others_stay_the_models_own(
    stub, judge, sampler: Sampler
) -> None:
    await check_sampled_logprobs(stub, judge, sampler.model_dir)


async def check_sampled_logprobs(stub: sampler_pb2_grpc.SamplerServiceStub, judge, model_dir: Path) -> None:
    """Requests that ask for them and the same ones that do not, all at once."""
    asking, plain = steered(), steered()
    for wanted in asking:
        wanted.sampled_logprobs = True
        wanted.prompt_logprobs = True
    results = await asyncio.gather(*(sample(stub, wanted) for wanted in [*asking, *plain]))
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    for wanted, mine, own in zip(asking, results[: len(asking)], results[len(asking) :], strict=True):
        model = judge(wanted.snapshot.version)
        tokens = ints(wanted.prompt)
        check_logprobs(floats(mine.prompt_logprobs)[1:], model.sequence_logprobs(tokens))
        for sequence, other in zip(mine.sequences, own.sequences, strict=True):
            sampled = ints(sequence.tokens)
            assert ints(other.tokens) == sampled
            logits = model.logits(tokens + sampled)[len(tokens) - 1 : -1]
            _check(sequence, _distribution(wanted, logits, sampled, tokenizer))
            _check(other, logits.log_softmax(-1))


def _distribution(
    wanted: sampler_pb2.SampleRequest, logits: torch.Tensor, sampled: list[int], tokenizer
) -> torch.Tensor:
    """What each token was drawn from: [tokens, vocabulary]."""
    words = [tokenizer.encode(word) for word in wanted.params.bad_words]
    return torch.stack(
        [
            drawn_from(
                row,
                wanted.params,
                ints(wanted.prompt),
                sampled[:place],
                _left(sampled[:place], tokenizer, len(row)) if wanted.constraint.regex else None,
                words,
            )
            for place, row in enumerate(logits)
        ]
    )


def _left(before: list[int], tokenizer, vocabulary: int) -> list[int]:
    """Tokens that the expression leaves."""
    length = LETTERS_LONG - len(tokenizer.decode(before))
    if not length:
        return [tokenizer.eos_token_id, tokenizer.pad_token_id]
    texts = {token: tokenizer.decode([token]) for token in range(vocabulary)}
    special = set(tokenizer.all_special_ids)
    return [
        token
        for token, text in texts.items()
        if token not in special and 1 <= len(text) <= length and set(text) <= set("abc")
    ]


def _check(sequence: sampling_pb2.SampledSequence, expected: torch.Tensor) -> None:
    sampled = torch.tensor(ints(sequence.tokens))[:, None]
    check_logprobs(floats(sequence.logprobs), expected.gather(1, sampled)[:, 0])
    ids = torch.tensor(ints(sequence.topk_logprobs.token_ids)).view(-1, K)
    told = floats(sequence.topk_logprobs.logprobs).view(-1, K)
    likely = expected.topk(K).values
    empty = likely.isneginf()
    check_logprobs(told, likely.masked_fill(empty, -99999.0))
    assert not ids[empty].any()
    check_logprobs(expected.gather(1, ids)[~empty], likely[~empty])
